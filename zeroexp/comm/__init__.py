"""How bytes move between ranks. This package knows how parameters are cut and which moves there are, no more of ZeRO.

facts.py           what the engine needs to know of a transport: one row for each
base.py            what a move takes and gives back, and what every transport can do
collectives.py     the one door: it chooses a transport and counts what every move sends
native.py          the backend's own collectives (NCCL, fake), one for each move; packing.py lays out its messages,
                   and journal.py ends the wait of ranks that do not issue the same
direct.py          every rank hands each peer what that peer owns, and sums in rank order:
  messages.py        between hosts by messages of gloo; watch.py ends waits that can not end
  shared_memory.py   on one host by reading each other's memory: meeting.py (how ranks find each other), board.py
                     (what they say), bell.py (how they wait), sizes.py (how much memory it takes)
stitching.py       a rank's own piece, mapped between what it copies from others
tuning.py          how large a reduction should be on these links
"""
