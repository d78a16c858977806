"""A cell of the benchmark: data only."""

from dataclasses import dataclass
from pathlib import Path

WARMUP, STEPS = 3, 8


@dataclass(frozen=True)
class Cell:
    """One engine on one job.

    layers: of the model, 0 for as many as it has. batch: rows per process, or per group of processes that share rows.
    seq: tokens per row. The other fields are the options of the same names.
    """

    engine: str
    model: str
    layers: int
    batch: int
    seq: int
    recompute: str
    compile: bool
    cuda_graphs: bool
    offload: bool
    offload_activations: bool
    state_bits: int
    sequence_parallel: int
    lora: int
    quantize: str
    shard_over: str
    mlp_chunks: int
    tuned: bool
    linear_loss: bool
    float8: str
    memory_limit: float
    lr: float
    warmup: int
    steps: int
    largest_batch: bool
    profile: Path | None
    trace: bool

    def name(self, gather: str) -> str:
        """Return the engine and its options, as the table shows them. gather: the option of that name."""
        recompute = "" if self.recompute == "none" else f"recompute={self.recompute}"
        chosen = {
            gather: self.engine == "ours" and gather != "auto",
            f"shard-over={self.shard_over}": self.shard_over != "world", "tuned": self.tuned, "compiled": self.compile,
            "cuda-graphs": self.cuda_graphs, recompute: bool(recompute), "offload": self.offload,
            "offload-activations": self.offload_activations, f"mlp-chunks={self.mlp_chunks}": self.mlp_chunks > 1,
            f"state-bits={self.state_bits}": self.state_bits != 32, "linear-loss": self.linear_loss,
            f"float8={self.float8}": self.float8 != "none", self.quantize: self.quantize != "none",
            f"within {self.memory_limit:g} GB": self.memory_limit > 0,
        }  # fmt: skip
        return " ".join([self.engine, *(word for word, said in chosen.items() if said)])

    def job(self, ranks: int) -> str:
        """Return the job's name: runs are compared if theirs is equal."""
        size = f"largest batch x{self.seq}" if self.largest_batch else f"{self.batch}x{self.seq}"
        if self.sequence_parallel > 1:
            size += f" over {self.sequence_parallel}"
        layers = f" of {self.layers} layers" if self.layers else ""
        adapters = f" LoRA rank {self.lora}" if self.lora else ""
        return f"{self.model}{layers}{adapters} {size} {ranks} ranks"
