"""Cases of transformers' tests/trainer/test_trainer_seq2seq.py around a sharded model."""

import torch
import transformers

import hf_bmtrain as bmt
import jobs
from regression import make_tokenizer
from tiny_models import build


class Articles(torch.utils.data.Dataset):
    """Random tokens and the first of them as a summary, padded with labels that are not looked at."""

    def __init__(self, size):
        self.ids = jobs.Rows(size).ids % 58 + 2

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        ids = self.ids[index]
        labels = ids[:4].clone()
        labels[3 - index % 2 :] = -100
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def make(folder, model, compute_metrics, **given):
    size = bmt.world_size()
    args = transformers.Seq2SeqTrainingArguments(
        folder, predict_with_generate=True, report_to=[], use_cpu=True, disable_tqdm=True,
        per_device_train_batch_size=4 // size, per_device_eval_batch_size=4 // size, **given,
    )  # fmt: skip
    trainer = transformers.Seq2SeqTrainer(
        model=bmt.auto_wrap(model), args=args, compute_metrics=compute_metrics, train_dataset=Articles(32),
        eval_dataset=Articles(16), processing_class=make_tokenizer(), callbacks=[bmt.hf.BMTrainCallback()],
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def exact_answers(prediction):
    tokenizer = make_tokenizer()
    labels = prediction.label_ids.copy()
    labels[labels == -100] = tokenizer.pad_token_id
    texts, expected = (
        tokenizer.batch_decode(ids.clip(0), skip_special_tokens=True) for ids in (prediction.predictions, labels)
    )
    return {"accuracy": sum(map(str.__eq__, texts, expected)) / len(texts), "texts": len(texts)}


def finetune_bert2bert(folder):
    """An encoder and a decoder in one model, generating in evaluation."""
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32,
    )  # fmt: skip
    both = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(config, config)
    model = transformers.EncoderDecoderModel(config=both)
    for owner in (model.config, model.generation_config):
        owner.decoder_start_token_id, owner.pad_token_id, owner.eos_token_id = 2, 0, 1
    given = {"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 2, "max_steps": 4, "generation_max_length": 6}
    trainer = make(folder, model, exact_answers, **given)
    trainer.train()
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(evaluations) == 2
    assert all(0 <= entry["eval_accuracy"] <= 1 and entry["eval_texts"] == 16 for entry in evaluations)


def samples(prediction):
    return {"samples": prediction.predictions.shape[0]}


def return_sequences(folder):
    """Every returned sequence of every row is counted."""
    trainer = make(folder, build("t5"), samples)
    for number in (3, 2, 1):
        config = transformers.GenerationConfig(
            max_new_tokens=5, num_beams=4, num_return_sequences=number, decoder_start_token_id=0, pad_token_id=0
        )
        metrics = trainer.evaluate(generation_config=config)
        assert metrics["eval_samples"] == 16 * number
