"""The benchmark from the command line to its table and chart, on CPU."""

import json
import sys
import warnings
from pathlib import Path

import pytest
import torch
from small_job import ROOT, TWO_RANKS, run
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3Config, Qwen3MoeConfig

from bench.engines.registry import check, why_missing
from bench.engines.shared_rows import compute_loss_in_chunks
from bench.measure import measure
from bench.models import IGNORED, flops_a_token, gpt, layers_of, make_batch, make_config, make_model
from bench.options import parse
from bench.table import plot, read_reports, table
from cases import full, in_full, rows_in_full
from common.adapters import add_adapters

BENCHMARK = ROOT / "recipes" / "benchmark.py"
TINY = ("--model", "tiny", "--batch", 2, "--seq", 16, "--warmup", 1, "--steps", 3, "--lr", 0.01)
ROWS, LENGTH = 16, 64
JOB = f"tiny {ROWS}x{LENGTH} 2 ranks"
ENGINES = {
    "ours": "--engine ours  # as it is\n\n",
    "fsdp2": "--engine fsdp2\n",
    "ddp": "--engine ddp\n",
    "ours recompute=full offload linear-loss": "--recompute full --offload --linear-loss\n",
    "fsdp2 tuned recompute=full offload": "--engine fsdp2 --tuned --recompute full --offload\n",
    "ddp tuned recompute=full": "--engine ddp --tuned --recompute full\n",
    "ours recompute=full offload-activations mlp-chunks=2": "--recompute full --offload-activations --mlp-chunks 2\n",
    "fsdp2 linear-loss": "--engine fsdp2 --linear-loss\n",
    "ours float8=rows": "--float8 rows\n",
}


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """Two cells that fail, without a model and without a package, followed by all engines that run on CPU."""
    folder = tmp_path_factory.mktemp("benchmark")
    lines = ["--model /no/such/model\n", "--engine bmtrain --recompute full\n", *ENGINES.values()]
    (folder / "cells").write_text("".join(lines))
    options = ("--batch", ROWS, "--seq", LENGTH)  # with fewer tokens, the rounding of bf16 hides what is compared
    options += ("--cells", folder / "cells", "--output", folder / "out", "--plot", folder / "bars.png")
    return run(TWO_RANKS, BENCHMARK, *TINY, *options), folder


@pytest.fixture(scope="module")
def small_mixture(tmp_path_factory):
    """The folder of the configuration of a mixture of 8 experts, 2 for each token."""
    folder = tmp_path_factory.mktemp("mixture")
    Qwen3MoeConfig(
        vocab_size=512, hidden_size=64, moe_intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, use_cache=False,
    ).save_pretrained(folder)  # fmt: skip
    return folder


@full
def test_engines_learn_alike(several):
    """All in one group. An optimizer without effect would be off by 0.037, DDP is by 0.0005, float8 by 0.005."""
    done, folder = several
    reports = read_reports(folder / "out", JOB)
    assert sorted(report["engine"] for report in reports) == sorted(ENGINES)
    [plain] = [report for report in reports if report["engine"] == "ours"]
    for report in reports:
        assert len(report["losses"]) == 4
        allowed = 0.008 if "float8" in report["engine"] else 1e-3
        assert report["losses"] == pytest.approx(plain["losses"], abs=allowed), report["engine"]
        assert report["spread_ms"][0] <= report["ms"] <= report["spread_ms"][1]
        assert report["tokens_a_second_a_rank"] == pytest.approx(ROWS * LENGTH / report["ms"] * 1e3)
        assert set(report["seconds"]) == {"build", "first step", "other steps"}
    assert (folder / "bars.png").read_bytes().startswith(b"\x89PNG")


@full
def test_engines_run_without_a_launcher(tmp_path):
    """Those that need torch's process group get one of a single process."""
    (tmp_path / "cells").write_text("--engine ours\n--engine fsdp2\n--engine ddp\n")
    done = run([sys.executable], BENCHMARK, *TINY, "--cells", tmp_path / "cells", "--output", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    losses = {report["engine"]: report["losses"] for report in read_reports(tmp_path / "out", "tiny 2x16 1 ranks")}
    assert sorted(losses) == ["ddp", "fsdp2", "ours"]
    for engine in ("ddp", "fsdp2"):
        assert losses[engine] == pytest.approx(losses["ours"], abs=5e-3), engine


@full
def test_ranks_share_rows(tmp_path):
    """Two ranks that share their rows learn what one learns from these rows."""
    losses = []
    for launcher, options in ((TWO_RANKS, ("--sequence-parallel", 2)), ([sys.executable], ())):
        done = run(launcher, BENCHMARK, *TINY, *options, "--warmup", 0, "--output", tmp_path)
        assert done.returncode == 0, done.stderr
    for job in ("tiny 2x16 over 2 2 ranks", "tiny 2x16 1 ranks"):
        [report] = read_reports(tmp_path, job)
        assert report["tokens_a_second_a_rank"] == pytest.approx(32 / (2 if "over" in job else 1) / report["ms"] * 1e3)
        losses.append(report["losses"])
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)


@pytest.mark.slow
def test_adapters_learn_alike(tmp_path, small_mixture):
    """Also on experts. Without the adapters' updates, the last loss would be off by 0.015."""
    pytest.importorskip("peft")
    (tmp_path / "cells").write_text("--recompute full\n--engine fsdp2\n--quantize nf4\n")
    options = ("--model", small_mixture, "--lora", 4, "--steps", 8)
    done = run(TWO_RANKS, BENCHMARK, *TINY, *options, "--cells", tmp_path / "cells", "--output", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    reports = read_reports(tmp_path / "out", f"{small_mixture} LoRA rank 4 2x16 2 ranks")
    losses = {report["engine"]: report["losses"] for report in reports}
    assert losses["ours recompute=full"] == pytest.approx(losses["fsdp2"], abs=2e-3)
    assert losses["ours nf4"] == pytest.approx(losses["fsdp2"], abs=4e-3)


def test_adapters_of_gpt2():
    """Its linear layers are transformers' Conv1D; the output layer gets no adapters."""
    pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "fan_in_fan_out")
        model = add_adapters(make_model(make_config("tiny", 8, 1), torch.float32, torch.device("cpu")), 4, 8)
    places = {name.partition(".lora_A")[0] for name, _ in model.named_parameters() if "lora_A" in name}
    layer = "base_model.model.transformer.h.0."
    assert places == {layer + name for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (make_config("bert-base", 8, 1), "for causal language models, and BertForMaskedLM is none"),
        *rows_in_full([(gpt(0, 64, 4, 8, 512), "GPT2LMHeadModel has no linear layers .* besides")]),
    ],
)
def test_adapters_are_refused_where_they_have_no_place(config, told):
    pytest.importorskip("peft")
    with pytest.raises(ValueError, match=told):
        add_adapters(make_model(config, torch.float32, torch.device("cpu")), 4, 8)


@full
def test_operations_of_experts_and_frozen_weights(small_mixture):
    """Counted by hand: 2 of 8 experts, and for frozen weights no products that give their own gradients."""
    pytest.importorskip("peft")
    config = make_config(str(small_mixture), 16)
    model = make_model(config, torch.float32, torch.device("cpu"))
    attention, experts, router, norms, head = 2 * 64 * 64 + 2 * 32 * 64, 3 * 64 * 48, 8 * 64, 2 * 64 + 2 * 16, 512 * 64
    fixed = 2 * (attention + 2 * experts + router + norms) + head
    scores = 6 * 2 * 64 * 16
    assert flops_a_token(model, 16) == 6 * fixed + scores
    adapted = 4 * ((64 + 64) * 2 + (64 + 32) * 2 + 2 * (64 + 96 + 48 + 64))  # of rank 4; q, o; k, v; both stacks
    assert flops_a_token(add_adapters(model, 4, 8), 16) == 4 * fixed + 6 * 2 * adapted + scores


@full
@pytest.mark.parametrize(
    ("config", "width"),
    [
        (Qwen3Config(hidden_size=64, intermediate_size=32, num_attention_heads=4, head_dim=64), 4 * 64),
        # queries and keys are wider than values
        (DeepseekV3Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=4, qk_nope_head_dim=16,
                          qk_rope_head_dim=8, v_head_dim=16), 4 * (24 + 16) // 2),
    ],
    ids=["wide heads", "latent attention"],
)  # fmt: skip
def test_operations_of_attention_whose_heads_do_not_make_up_the_width(config, width):
    for name, value in {"vocab_size": 64, "num_hidden_layers": 2, "moe_intermediate_size": 32}.items():
        setattr(config, name, value)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert flops_a_token(model, 100) - flops_a_token(model, 0) == 6 * 2 * width * 100


@full
def test_a_loss_in_chunks_is_refused_where_it_would_be_another():
    for name in ("bert-base", "bert-classifier"):
        model = make_model(make_config(name, 8, 1), torch.float32, torch.device("cpu"))
        with pytest.raises(ValueError, match="it does not predict the next token"):
            compute_loss_in_chunks(model, 1)
    model = make_model(make_config("tiny", 8, 1), torch.float32, torch.device("cpu"))
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="its config has final_logit_softcapping"):
        compute_loss_in_chunks(model, 1)


@full
def test_a_cell_that_fails_is_told_and_the_next_runs(several):
    done, folder = several
    assert done.returncode == 1
    assert f"/no/such/model {ROWS}x{LENGTH} 2 ranks: ours failed: OSError" in done.stdout
    [line] = [line for line in done.stdout.splitlines() if line.startswith("bmtrain is left out")]
    assert "pip install bmtrain" in line
    assert len(list((folder / "out").glob("*.json"))) == len(ENGINES)


@full
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--engine", "fsdp2", "--recompute", "auto"), "--engine fsdp2 has no --recompute auto"),
        *rows_in_full(
            [
                (("--engine", "ddp", "--offload"), "--engine ddp has no --offload"),
                (("--engine", "ddp", "--float8", "rows"), "--engine ddp has no --float8 rows"),
                (("--engine", "ddp", "--sequence-parallel", "2"), "--engine ddp has no --sequence-parallel"),
                (("--engine", "fsdp2", "--shard-over", "auto"), "--engine fsdp2 has no --shard-over auto"),
                (("--offload-activations",), "it needs --recompute full"),
                (("--offload", "--state-bits", "8"), "leave out --state-bits"),
                (("--engine", "ddp", "--lora", "8"), "--engine ddp has no --lora"),
                (("--engine", "fsdp2", "--lora", "8", "--quantize", "nf4"), "--engine fsdp2 has no --quantize nf4"),
                (("--quantize", "nf4"), "without --lora none are frozen"),
                (("--profile", "trace.json", "--no-trace"), "--profile writes the trace"),
                (("--profile", "trace.json", "--largest-batch"), "a search has no such step"),
                (("--no-trace", "--largest-batch"), "--no-trace has no effect on --largest-batch"),
                (("--steps", "9", "--largest-batch"), "--steps has no effect on --largest-batch"),
                (("--warmup", "0", "--largest-batch"), "--warmup has no effect on --largest-batch"),
                (("--sequence-parallel", "3", "--seq", "16"), "does not divide --seq 16"),
                (("--float8", "tensor"), "--engine ours has no --float8 tensor; it has: recompute none"),
                (("--engine", "bmtrain"), "--engine bmtrain has no --recompute none; it has: recompute full, offload"),
            ]
        ),
    ],
)
def test_what_an_engine_cannot_do_is_refused(options, told):
    [cell], _ = parse(options)
    with pytest.raises(ValueError, match=told):
        check(cell)


@pytest.mark.parametrize(
    "option",
    [("--profile", "trace.json"), ("--cuda-graphs", "--compile"), ("--no-trace",), *in_full(("--memory-limit", "4"))],
)
def test_what_only_gpus_have_is_refused_on_a_cpu(option):
    [cell], _ = parse(option)
    with pytest.raises(ValueError, match=f"{option[0]} works on GPUs only"):
        measure(cell, "ours", torch.device("cpu"))


@full
def test_lines_of_a_file_are_cells(tmp_path, capsys):
    file = tmp_path / "cells"
    file.write_text("# nothing\n--engine ddp --batch 4\n--compile --recompute full --gather auto\n")
    cells, options = parse(["--cells", str(file), "--seq", "64"])
    assert [(cell.engine, cell.batch, cell.seq) for cell in cells] == [("ddp", 4, 64), ("ours", 8, 64)]
    assert [cell.name(options.gather) for cell in cells] == ["ddp", "ours compiled recompute=full"]
    assert cells[1].name("peer") == "ours peer compiled recompute=full"
    file.write_text("--batch 4\n--gather peer\n")
    with pytest.raises(ValueError, match="line 2: --gather holds for all cells"):
        parse(["--cells", str(file)])
    file.write_text("--engine ours\n--engine deepspeed --sequence-parallel 2\n")
    with pytest.raises(ValueError, match="needs processes of its own"):
        parse(["--cells", str(file)])
    file.write_text("--batch 4\n\n--engine none\n")
    with pytest.raises(SystemExit):
        parse(["--cells", str(file)])
    assert f"in {file}, line 3" in capsys.readouterr().err


def test_an_option_of_ours_is_refused_without_ours(tmp_path):
    with pytest.raises(ValueError, match="--gather peer is for --engine ours, which is not measured"):
        parse(["--engine", "ddp", "--gather", "peer"])
    (tmp_path / "cells").write_text("--engine ddp\n--engine ours\n")
    assert parse(["--cells", str(tmp_path / "cells"), "--gather", "peer"])[1].gather == "peer"


@pytest.mark.parametrize("option", ["--plot", *in_full("--plot-recorded")])
def test_a_chart_of_an_unknown_format_is_refused(capsys, option):
    """Before anything is measured."""
    with pytest.raises(SystemExit):
        parse([option, "bars.foo"])
    assert f"{option}: bars.foo must end in .png or .svg" in capsys.readouterr().err
    _, options = parse([option, "a/b.SVG"])
    assert Path("a/b.SVG") in (options.plot, options.plot_recorded)


@full
def test_what_was_not_measured_here_is_marked(tmp_path):
    job = "gpt-13b 8x512 4 ranks"
    report = {"engine": "ours", "job": job, "ms": 864.0, "spread_ms": [860.0, 870.0], "TFLOPs": 368.0, "losses": [1.0]}
    (tmp_path / "one.json").write_text(json.dumps(report))
    (tmp_path / "other_job.json").write_text(json.dumps(report | {"job": "tiny"}))
    assert marked(tmp_path, job) == [("megatron-fsdp", True), ("ours", False), ("deepspeed", True), ("bmtrain", True)]
    (tmp_path / "two.json").write_text(json.dumps(report | {"engine": "deepspeed tuned", "ms": 900.0}))
    assert marked(tmp_path, job)[2] == ("deepspeed", False)  # what was measured is not quoted besides


def marked(folder, job) -> list[tuple[str, bool]]:
    lines = table(read_reports(folder, job)).splitlines()[1:]
    return [(line.split()[0], "other run" in line) for line in lines]


@full
def test_the_largest_batch_comes_first(tmp_path):
    job = "tiny largest batch x16 2 ranks"
    for engine, rows in (("ours", 12), ("fsdp2", 8), ("ddp", 0)):
        report = {"engine": engine, "job": job, "largest_batch": rows} | ({"ms": 9.0, "TFLOPs": 1.0} if rows else {})
        (tmp_path / f"{engine}.json").write_text(json.dumps(report))
    lines = table(read_reports(tmp_path, job)).splitlines()[1:]
    assert [line.split()[:2] for line in lines] == [["ours", "12"], ["fsdp2", "8"], ["ddp", "0"]]
    plot(read_reports(tmp_path, job), job, tmp_path / "bars.svg")  # of the rows: not even one fits with DDP
    assert "rows of the largest batch that fits" in (tmp_path / "bars.svg").read_text()


def test_a_trace_beside_the_reports_is_none_of_them(tmp_path):
    (tmp_path / "trace.json").write_text('{"traceEvents": []}')
    (tmp_path / "list.json").write_text("[]")
    assert read_reports(tmp_path, "tiny") == []


def test_a_missing_package_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)

    def missing(*options: str) -> str | None:
        return why_missing(parse(options)[0][0])

    assert [missing("--engine", engine) for engine in ("ours", "fsdp2", "ddp")] == [None, None, None]
    assert missing("--float8", "rows") is None
    told = missing("--engine", "fsdp2", "--float8", "tensor")
    assert told is not None and "fsdp2 is left out" in told and "pip install torchao" in told


@full
def test_layers_are_part_of_the_job():
    [cell], _ = parse(("--layers", "2", "--float8", "rows"))
    assert (cell.job(2), cell.name("auto")) == ("tiny of 2 layers 8x512 2 ranks", "ours float8=rows")
    assert [
        len(layers_of(make_model(make_config("tiny", 8, layers), torch.float32, torch.device("cpu"))))
        for layers in (0, 2)
    ] == [4, 2]


@full
def test_every_engine_gets_the_same_batch():
    device = torch.device("cpu")
    bert = make_batch(make_config("bert-base", 32), 8, 32, 7, device)
    guessed = bert["labels"] != IGNORED
    assert (guessed.any(dim=1)).all() and 0.1 < guessed.float().mean() < 0.25
    assert (bert["input_ids"][guessed] == 30521).all()
    causal = make_batch(make_config("tiny", 32), 8, 32, 7, device)
    assert causal["labels"] is causal["input_ids"]
    again = make_batch(make_config("tiny", 32), 8, 32, 7, device)
    assert (again["input_ids"] == causal["input_ids"]).all()
