"""The published figures, as data: each table with the study that plans it (conf/study/)."""

from __future__ import annotations

from benchmarks import published as ours
from benchmarks.published import GB, GIB, MIB, PublishedRow, PublishedTable

READ_AFTER_STEP = (
    "The source read the memory after the step; between forward and backward FSDP2 without reshard "
    "holds one whole copy of the parameters more."
)
NO_SUCH_ROW = (
    "The source has no such row. Without gradient_as_bucket_view DDP's own buckets would hold "
    "1380.26 MiB more."
)
LAZY = "DDP all-reduces all gradients, so torch's ZeRO-1 is the lazy one."
ROOT_STAYS = "The root (embedding and head) stays gathered from forward to backward."
NO_GRADIENTS = "The published baseline is read while no gradient exists; after backward ours holds 2.50 GiB more."

TABLE_A = PublishedTable(
    study="table_a",
    title="A. SmolLM2-360M with a head of five labels, fp32, AdamW, 2 ranks",
    unit="MiB, mean over ranks but for the last two columns",
    unit_bytes=MIB,
    slack=1.51,
    measures={
        "model": ours.mean_of("parameters"),
        "grad": ours.mean_of("gradients"),
        "optim": ours.mean_of("optimizer"),
        "total": ours.total,
        "vs baseline": ours.ratio_to_baseline,
        "fullest": ours.fullest,
        "fullest vs baseline": ours.fullest_ratio_to_baseline,
    },
    rows=(
        PublishedRow(
            "ddp",
            "parameter",
            {
                "model": "1380.26",
                "grad": "1380.26",
                "optim": "2760.51",
                "total": "5521.03",
                "vs baseline": "1.000",
                "fullest": "5521.03",
            },
        ),
        PublishedRow(
            "zero1_allreduce",
            "parameter",
            {
                "model": "1380.26",
                "grad": "1380.26",
                "optim": "1380.26",
                "total": "4140.78",
                "vs baseline": "0.750",
                "fullest": "4327.78",
                "fullest vs baseline": "0.784",
            },
        ),
        PublishedRow(
            "zero2",
            "parameter",
            {
                "model": "1380.26",
                "grad": "690.12",
                "optim": "1380.26",
                "total": "3450.65",
                "vs baseline": "0.625",
                "fullest": "3731.16",
                "fullest vs baseline": "0.676",
            },
        ),
        PublishedRow(
            "zero3",
            "parameter",
            {
                "model": "690.12",
                "grad": "690.12",
                "optim": "1380.26",
                "total": "2760.51",
                "vs baseline": "0.500",
                "fullest": "3134.53",
                "fullest vs baseline": "0.568",
            },
        ),
        PublishedRow(
            "zero1",
            "torch",
            {
                "model": "1380.26",
                "grad": "1380.26",
                "optim": "1380.3",
                "total": "4140.8",
                "vs baseline": "0.750",
            },
            NO_SUCH_ROW,
        ),
        PublishedRow(
            "zero2",
            "torch",
            {
                "model": "690.13",
                "grad": "690.13",
                "optim": "1380.26",
                "total": "2760.52",
                "vs baseline": "0.500",
            },
            READ_AFTER_STEP,
        ),
        PublishedRow(
            "zero3",
            "torch",
            {
                "model": "690.13",
                "grad": "690.13",
                "optim": "1380.26",
                "total": "2760.52",
                "vs baseline": "0.500",
            },
        ),
    ),
    notes=(
        "A mean over ranks hides the rank that runs out of memory: owners are consecutive parameters, "
        "and the embedding makes one rank's share larger (the columns of the fullest rank).",
    ),
)
TABLE_B = PublishedTable(
    study="table_b",
    title="B. 7B parameters, fp32, Adam, 8 ranks",
    unit="GB (1e9 bytes) of one rank",
    unit_bytes=GB,
    nominal=7e9,
    measures={"total": ours.total},
    rows=(
        PublishedRow("ddp", "buffer", {"total": "112"}),
        PublishedRow("zero1", "buffer", {"total": "63"}),
        PublishedRow("zero2", "buffer", {"total": "38.5"}),
        PublishedRow("zero3", "buffer", {"total": "14"}),
    ),
    notes=(
        "7B is a round number: LLaMA 7B has 6,738,415,616 parameters, which the last column counts.",
    ),
)
TABLE_C = PublishedTable(
    study="table_c",
    title="C. 7.5B parameters at 16 bytes each, 64 ranks",
    unit="GB (1e9 bytes) of one rank",
    unit_bytes=GB,
    nominal=7.5e9,
    measures={"total": ours.total},
    rows=(
        PublishedRow("ddp", "buffer", {"total": "120"}),
        PublishedRow("zero1", "buffer", {"total": "31.406"}),
        PublishedRow("zero2", "buffer", {"total": "16.641"}),
        PublishedRow("zero3", "buffer", {"total": "1.875"}),
    ),
    notes=(
        "The model planned is LLaMA 7B, scaled to 7.5B; the last column is that of LLaMA 7B itself.",
    ),
)
TABLE_D = PublishedTable(
    study="table_d",
    title="D. MLP of 10 layers, d = 4096, bf16 with fp32 master weights, 4 ranks",
    unit="GiB of one rank",
    unit_bytes=GIB,
    measures={
        "parameters": ours.mean_of("parameters"),
        "gradients": ours.mean_of("gradients"),
        "master": ours.mean_of("master"),
        "Adam m": ours.one_moment,
        "Adam v": ours.one_moment,
        "total": ours.total,
        "total at rest": ours.at_rest,
        "cast": ours.cast,
        "saving": ours.saving,
    },
    rows=(
        PublishedRow(
            "ddp",
            "buffer",
            {
                "parameters": "2.50",
                "master": "5.00",
                "Adam m": "5.00",
                "Adam v": "5.00",
                "total at rest": "17.50",
            },
            NO_GRADIENTS,
        ),
        PublishedRow(
            "zero1",
            "buffer",
            {
                "parameters": "2.50",
                "gradients": "2.50",
                "master": "1.25",
                "Adam m": "1.25",
                "Adam v": "1.25",
                "total": "8.75",
                "cast": "1.25",
                "saving": "0.427",
            },
            "The table leaves out the cast of the gradient's shard to fp32, 1.25 GiB; with it the saving is 0.429.",
        ),
    ),
)
TRAFFIC = PublishedTable(
    study="traffic",
    title="Traffic of a step, by the plain schedule",
    unit="P (N-1)/N: P is the bytes of all parameters, N the ranks (8)",
    measures={"times": ours.times},
    rows=(
        PublishedRow("ddp", "buffer", {"times": "2.00"}),
        PublishedRow("zero1", "buffer", {"times": "2.00"}),
        PublishedRow("zero2", "buffer", {"times": "2.00"}),
        PublishedRow("zero3", "buffer", {"times": "3.00"}),
        PublishedRow("zero1_allreduce", "buffer", {"times": "3.00"}),
        PublishedRow("ddp", "torch", {"times": "2.00"}),
        PublishedRow("zero1", "torch", {"times": "2.00"}, LAZY),
        PublishedRow("zero2", "torch", {"times": "2.00"}),
        PublishedRow("zero3", "torch", {"times": "3.00"}, ROOT_STAYS),
    ),
)  # fmt: skip

TABLES = (TABLE_A, TABLE_B, TABLE_C, TABLE_D, TRAFFIC)
