"""python -m hf_bmtrain.memory: its table, and errors that name the argument and the remedy."""

import re

import pytest
import torch
import transformers

from cases import full, in_full, rows_in_full
from hf_bmtrain.features.prediction.command_line import parse
from hf_bmtrain.hf import meta_model
from hf_bmtrain.hf import predict_cli as command


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("config")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, vocab_size=100,
        max_position_embeddings=128,
    )  # fmt: skip
    config.save_pretrained(folder)
    return str(folder)


def run(*words: str) -> None:
    command.main(parse([*words]))


@pytest.mark.parametrize(
    "options",
    [["--offload", "--dtype", "fp32"], *in_full(["--recompute", "false", "--zero", "2", "--gpus", "4"])],
)
def test_a_table_is_printed(config, options, capsys):
    run(config, "--batch-size", "2", "--seq-len", "128", "--memory", "4", *options)
    printed = capsys.readouterr().out
    assert "parameters, this rank's shards" in printed
    assert "fits into 4 GiB" in printed and "would fit" not in printed
    assert "largest number of rows that fits: " in printed
    assert ("page-locked host memory" in printed) == ("--offload" in options)
    assert " MiB\n" in printed and not re.search(r" 0\.00 [GM]iB$", printed, re.MULTILINE)


@pytest.mark.parametrize("adapters", in_full(True, False))
def test_what_would_fit_is_told(tmp_path, monkeypatch, adapters):
    """With the options that are named the step fits, in as many GiB. Adapters need PEFT."""
    if adapters:
        pytest.importorskip("peft")
    for module in command, meta_model:
        monkeypatch.setattr(module, "is_peft_available", lambda: adapters)
    transformers.LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=6, num_attention_heads=16, vocab_size=100
    ).save_pretrained(tmp_path)
    words, config = [str(tmp_path), "--seq-len", "128", "--memory", "6"], command.read_config(tmp_path)
    told = command.remedies(parse(words), config).splitlines()
    if not adapters:
        assert told.pop() == "--lora and --quantize were not tried, because PEFT is not installed (pip install peft)"
        with pytest.raises(SystemExit, match="--lora needs PEFT"):
            run(*words, "--lora", "8")
    named = {line[:54].strip(): line[54:].strip() for line in told[1:]}
    assert list(named) == ["--optimizer adam8", "--offload", "--gpus 4", *adapters * ["--lora 16 --quantize nf4"]]
    for options, size in named.items():
        given = parse([*words, *options.split()])
        prediction = command.predicted(given, config, 1)
        assert "\nfits" in command.report(given, prediction, 1)
        # frozen weights stay unsharded if they fit
        assert f"{prediction.peak / 2**30:.2f} GiB" == size or "--lora" in options
    given = parse([*words, "--rows", "4000"])
    assert command.remedies(given, config).startswith("none of the changes that were tried makes it fit")


@full
def test_a_quantized_base_takes_less(config, capsys):
    """Weights of 4 bits where they had 16; unpacked ones are whole as before."""
    pytest.importorskip("peft")
    rows, unit = {}, {"MiB": 2**20, "GiB": 2**30}
    wide = transformers.LlamaConfig.from_pretrained(
        config, hidden_size=1024, intermediate_size=4096, max_position_embeddings=2048
    )
    wide.save_pretrained(f"{config}/wide")
    for options in ([], ["--quantize", "nf4"]):
        run(f"{config}/wide", "--length", "128", "--lora", "4", "--gpus", "2", "--memory", "4", *options)
        printed = capsys.readouterr().out.splitlines()
        sizes = [(line[:54].strip(), *line[54:].split()) for line in printed if line.endswith((" GiB", " MiB"))]
        rows[bool(options)] = {name: float(size) * unit[its] for name, size, its in sizes}
    shards, whole = "parameters, this rank's shards", "full parameters of gathered blocks and modules"
    assert rows[True][shards] < 0.4 * rows[False][shards]
    assert rows[True][whole] <= rows[False][whole]
    with pytest.raises(SystemExit):
        run(config, "--quantize", "nf4")
    assert "Add --lora" in capsys.readouterr().err


@full
def test_the_state_of_each_optimizer(config, capsys):
    """8-bit state takes 4.06 bytes per element where the usual one takes 10, and Muon's of matrices 8.

    Rows are long enough that the peak is in the backward: in its step Muon also has the matrices that ranks exchange.
    """
    states = {}
    wide = transformers.LlamaConfig.from_pretrained(
        config, hidden_size=1024, intermediate_size=4096, max_position_embeddings=2048
    )
    wide.save_pretrained(f"{config}/wide")
    for optimizer in ("adam", "adam8", "muon"):
        run(f"{config}/wide", "--length", "2048", "--gpus", "2", "--memory", "4", "--optimizer", optimizer)
        lines = capsys.readouterr().out.splitlines()
        (states[optimizer],) = (float(line.split()[-2]) for line in lines if line.startswith("optimizer state"))
    assert states["adam8"] == pytest.approx(0.406 * states["adam"], abs=0.011)
    assert states["muon"] == pytest.approx(0.8 * states["adam"], abs=0.011)


@pytest.mark.parametrize("most", [17, *in_full(0, 4000)])
@pytest.mark.parametrize("power", [1.3, *in_full(1.0, 2.0)])
def test_the_largest_number_of_rows_fits_and_one_more_does_not(most, power):
    tried = []

    def peak(rows):
        tried.append(rows)
        return 10_000_000 + int(1000 * rows**power)

    assert command.most_rows(peak, peak(most) if most else 10_000_000) == most
    assert len(tried) < (7 if power == 1 else 30)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rows", "-3"], "argument --batch-size/--rows: '-3' must be an integer of at least 1"),
        (["--offload", "--optimizer", "sgd"], "--offload works only with --optimizer adam (the default), not sgd"),
        *rows_in_full(
            [
                (["--rows", "0"], "argument --batch-size/--rows: '0' must be an integer of at least 1"),
                (["--length", "many"], "argument --seq-len/--length: 'many' must be"),
                (["--gpus", "0"], "argument --gpus: '0' must be"),
                (["--lora", "0"], "argument --lora: '0' must be"),
                (["--memory", "0"], "argument --memory: the memory of one GPU must be a number of GiB"),
                (["--zero", "1"], "argument --zero: invalid choice"),
            ]
        ),
    ],
)
def test_bad_arguments_are_named(config, words, message, capsys):
    with pytest.raises(SystemExit):
        run(config, *words)
    assert message in capsys.readouterr().err


@full
def test_an_unknown_configuration_and_a_length_beyond_the_positions(config, tmp_path):
    with pytest.raises(SystemExit, match="CONFIG .* is not a configuration .* Pass a config.json"):
        run(str(tmp_path / "missing"))
    with pytest.raises(
        SystemExit, match="--seq-len 129 exceeds the model's maximum of 128 positions: pass 128 or less"
    ):
        run(config, "--length", "129")


def test_rows_that_do_not_change_the_peak():
    """The optimizer's step needs more memory than the forward and backward of a few rows."""
    tried = []

    def peak(rows):
        tried.append(rows)
        return max(1000, 10 * rows)

    assert command.most_rows(peak, 4000) == 400
    assert len(tried) < 40


def test_models_of_several_sequences_per_row():
    model, config = transformers.BertForMultipleChoice, transformers.BertConfig(num_hidden_layers=1)
    with torch.device("meta"), pytest.raises(ValueError, match=r"BertForMultipleChoice, whose rows have several"):
        meta_model.text_batch(model(config), config, 2, 8)
