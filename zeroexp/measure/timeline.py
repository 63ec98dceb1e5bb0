"""The timeline of one step of one rank, as a file in the run's folder: trace.<rank>.<step>.json.

The file is JSON in the trace-event format, which Perfetto and chrome://tracing open as it is:

    {"traceEvents": [...], "displayTimeUnit": "ms", "otherData": {...}}

`ts` and `dur` are microseconds; ts 0 is the beginning of this rank's step. `pid` is the rank. Events by `ph`:

    "M"   names: process_name "rank 1", thread_name of each row (`tid`) below
    "X"   a span with `ts`, `dur`, `name`, `cat` and `args`, by `cat`:
            phase     tid 0   data | forward | backward | optimizer | step, without gaps
            unit      tid 1   forward or backward of one block; args {"unit": "model.layers.0", "pass": "forward"}
            verb      tid 2   this rank's thread issues or waits for a move; args {"verb": "gather", "what":
                              "unit model.layers.0", "part": "issue" | "wait"}
            exposed   tid 3   inside of a wait: the rank does nothing; args {"verb", "what", "peer": 1 or null}
            flight    tid 4   a move under way beside compute, from its issue to its wait; args {"verb", "what"}
                              (spans of one row may overlap here)
            backend   tid 5   what torch names itself: collectives and engines in C++ ("c10d::allreduce_",
                              "FSDP::all_gather"); args {"async": true} where another thread ended it
    "C"   memory over time: name "memory", args {cause: bytes} with every cause of record.CAUSES that the step has, in
          their order, to be stacked; their sum is all that torch's allocator and shared memory hold

`otherData` holds {"rank", "world_size", "step", "began_at": Unix seconds of ts 0, by which ranks are aligned,
"strategy", "implementation", "peak": the Peak of record.py or null}.
"""
