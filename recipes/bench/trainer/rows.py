"""Rows, columns and cells of the stock Trainer's table: data only."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """What is trained, and the TrainingArguments of that name.

    adapters: LoRA; otherwise all weights. quantized: the frozen base in 4 bits. own_optimizer: Trainer makes its own
    AdamW for ours too. sft: TRL's SFTTrainer with its own defaults, which puts the adapters in itself. long: ours
    computes MLPs and the loss in chunks and keeps layers' inputs in host memory, as recipes/guides/long_context.md says
    for long rows. rivals: the row whose cells the other columns share.
    """

    title: str
    adapters: bool = True
    bf16: bool = False
    recompute: bool = False
    compile: bool = False
    quantized: bool = False
    own_optimizer: bool = False
    sft: bool = False
    long: bool = False
    rivals: str = ""


ROWS = {
    "lora": Row("LoRA, PEFT's defaults"),
    "lora-bf16": Row("LoRA, bf16=True", bf16=True),
    "lora-recomputed": Row("LoRA, gradient checkpointing", recompute=True),
    "lora-own-adamw": Row("LoRA, bf16=True, Trainer's AdamW", bf16=True, own_optimizer=True, rivals="lora-bf16"),
    "lora-compiled": Row("LoRA, bf16=True, compiled", bf16=True, compile=True),
    "qlora": Row("QLoRA, nf4, bf16=True", bf16=True, quantized=True),
    "full": Row("all weights, in bf16", adapters=False, bf16=True),
    "full-compiled": Row("all weights, in bf16, compiled", adapters=False, bf16=True, compile=True),
    "long": Row("all weights, recomputed, long rows", adapters=False, bf16=True, recompute=True, long=True),
    "long-compiled": Row(
        "all weights, recomputed, long rows, compiled",
        adapters=False,
        bf16=True,
        recompute=True,
        compile=True,
        long=True,
    ),
    "sft": Row("LoRA, TRL's SFTTrainer", bf16=True, recompute=True, sft=True),
}
COLUMNS = {"ours": "hf_bmtrain", "plain": "plain, 1 rank", "ddp": "DDP", "fsdp2": "FSDP2"}
"""In the order in which the cells of a row are measured."""
FUSED, KEPT, BY_LAYER, LIGER, GRAPHS = "fused loss", "kept", "by layer", "Liger", "CUDA graphs"
NON_BLOCKING = "non-blocking"
"""Variants: ours with `fuse_causal_loss`; FSDP2 that does not reshard after forward; Accelerate's regional compilation,
without which torch_compile=True compiles the whole model; TrainingArguments(use_liger_kernel=True), which computes the
loss without whole logits; TrainingArguments(torch_compile_mode="reduce-overhead"); copies of batches for which Trainer
does not wait, with TrainingArguments(accelerator_config={"non_blocking": True}), which our callback sets itself."""


@dataclass(frozen=True)
class Job:
    """The model and sizes of all cells. layers: 0 for as many as it has. rank: of the adapters. batch: per process."""

    model: str
    layers: int
    rank: int
    batch: int
    seq: int
    warmup: int
    steps: int
    lr: float
    ranks: int

    def name(self) -> str:
        """Return the job in words."""
        layers = f" of {self.layers} layers" if self.layers else ""
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{self.model}{layers}, LoRA rank {self.rank}, {self.batch}x{self.seq}, {ranks}"


@dataclass(frozen=True)
class Cell:
    """One column of a row, in one of its variants."""

    row: str
    column: str
    variant: str = ""

    def name(self) -> str:
        return " ".join([self.row, self.column, *([f"({self.variant})"] if self.variant else [])])

    def ranks(self, job: Job) -> int:
        return 1 if self.column == "plain" else job.ranks


VARIANTS = ("first", "usual", "all")


def variants(row: Row, column: str, which: str) -> list[str]:
    """Return the variants of a cell, of which the fastest counts. which: one of VARIANTS; "all" adds slower ones."""
    if column == "ours":
        found = [FUSED] if row.long else ["", *([FUSED] if not row.sft else [])]
        found += [LIGER] if which == "all" else []
        found += [GRAPHS, f"{FUSED}, {GRAPHS}"] if row.compile and not row.long else []
    elif column == "fsdp2":
        found = [BY_LAYER, f"{KEPT}, {BY_LAYER}"] if row.compile else ["", KEPT]
        found += ["", KEPT] if row.compile and which == "all" else []
        found += [LIGER, f"{KEPT}, {LIGER}"] if which == "all" and not row.compile else []
    else:
        found = [
            "",
            *([BY_LAYER] if row.compile and which == "all" else []),
            *([LIGER] if row.long or which == "all" else []),
        ]
        found += [GRAPHS] if row.compile and not row.long else []
    if which == "all" and column != "ours":
        found += [", ".join(filter(None, [variant, NON_BLOCKING])) for variant in found]
    return found[:1] if which == "first" else found


def cells_of(rows: list[str], columns: list[str], which: str) -> list[Cell]:
    """Return the cells to measure, row by row, each once. which: one of VARIANTS."""
    found = {}
    for name in rows:
        for column in columns:
            source = name if column == "ours" else ROWS[name].rivals or name
            for variant in variants(ROWS[source], column, which):
                found[Cell(source, column, variant)] = None
    return list(found)
