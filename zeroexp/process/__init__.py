"""One process among others: its rank and device, how ranks meet, signals, output, locks, and how far it is.

world.py         rank, world size, device and process group; no other file reads a rank from the environment
rendezvous.py    the store in which the ranks of a job meet; ports.py: at which port
progress.py      how far a rank is, in memory that it shares with the process that started it
watchdog/        whether the ranks of a job live, advance and do the same
on_ranks.py      a function that runs on ranks of this machine
signals.py       Ctrl-C, SIGTERM and SIGHUP
locks.py         locks that a process holds for its life; durable.py: files that survive a power cut
content_hash.py  the hash of what lies on a disk
safe_output.py   output whose failures end no work; writable.py: folders that take results
server_address.py  whether a server answers, and addresses without their passwords
json_output.py   `--json`; cheap_imports.py: imports of large libraries
"""
