"""docs/recipes/sentence-transformers.md: the trainer with RetrievalAPLoss trains as one process does."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
from integration_cases import change, flat, reset_accelerate, train, worst
from loss_cases import normal
from on_ranks import gathered, on_ranks
from pages import blocks, run_block
from subjects import error
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from workers import WorkerPool

from fullrank import RetrievalSmoothAPLoss, SupConLoss
from fullrank.integrations.sentence_transformers import RetrievalAPLoss

pytestmark = pytest.mark.slow
FRAMEWORK = ["accelerate", "datasets", "transformers.trainer", "sentence_transformers"]

SCRIPT, POOLED = blocks("recipes/sentence-transformers.md")
IMPORTS = "\n".join(line for line in SCRIPT.splitlines() if line.startswith("from "))
LIMIT = 1e-6
TOPICS, WORDS = 8, 5


def make_model() -> Any:
    """Return a model with an embedding for each word, made from its modules, in float64."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    vocabulary = {"unknown": 0} | {f"w{word}": word + 1 for word in range(TOPICS * WORDS)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="unknown"))
    tokenizer.pre_tokenizer = Whitespace()
    weights = torch.randn(len(vocabulary), 6, generator=torch.Generator().manual_seed(0))
    return SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_weights=weights)], device="cpu").double()


def make_texts(number: int, seed: int) -> dict[str, list[Any]]:
    """Return texts of three words: two of a topic, which is the label, and one of any."""
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randint, generator=generator)
    labels = [index % TOPICS for index in range(number)]
    words = [[*(label * WORDS + draw(WORDS, (2,))).tolist(), int(draw(TOPICS * WORDS, ()))] for label in labels]
    return {"text": [" ".join(f"w{word}" for word in text) for text in words], "label": labels}


def make_arguments(folder: str, options: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Return the arguments of the page, quiet, with a constant learning rate."""
    from sentence_transformers import SentenceTransformerTrainingArguments

    reset_accelerate()
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False}
    schedule = {"lr_scheduler_type": "constant", "eval_on_start": True, "logging_steps": 1}
    return SentenceTransformerTrainingArguments(folder, **{**kwargs, **quiet, **schedule, **options})


def trained(rank: int, script: str, folder: str, options: dict[str, Any]) -> tuple[float, float, list[float]]:
    """Return the errors of parameters and last loss, and the metric before training and after each epoch."""
    from datasets import Dataset

    model, reference = make_model(), make_model()
    before, seen = flat(model), []

    class Recorded(RetrievalAPLoss):
        def forward(self, features: Any, labels: Any = None) -> Tensor:
            features = list(features)
            if self.training:
                seen.append(({key: value.clone() for key, value in features[0].items()}, labels.clone()))
            return super().forward(features, labels)

    val = make_texts(40, 1)
    corpus = {str(index): text for index, text in enumerate(val["text"])}
    relevant = {one: {two for two in corpus if two != one and int(two) % TOPICS == int(one) % TOPICS} for one in corpus}
    names = {"model": model, "train_set": Dataset.from_dict(make_texts(256, 0)), "corpus": corpus, "queries": corpus}
    script = script.replace("SentenceTransformerTrainingArguments(\n", "make_arguments(\n")
    script = script.replace("loss=RetrievalAPLoss(model", "loss=Recorded(model")
    names |= {"relevant_docs": relevant, "Recorded": Recorded}
    names["make_arguments"] = partial(make_arguments, folder, {"load_best_model_at_end": False, **options})
    trainer = run_block(script, names)["trainer"]
    log = trainer.state.log_history
    steps = list(zip(*gathered(seen)))
    loss_fn = RetrievalSmoothAPLoss(gather_distributed=False)

    def loss(epoch: int, step: int, rows: list[int]) -> Tensor:
        embeddings = torch.cat([reference(part)["sentence_embedding"] for part, _ in steps[step]])
        return loss_fn(embeddings, torch.cat([labels for _, labels in steps[step]]).reshape(-1))

    adam = partial(torch.optim.AdamW, lr=2e-2, weight_decay=0.0)
    expected, losses, _ = train(reference, loss, [[[]] * len(steps)], max_norm=1.0, make_optimizer=adam)
    logged = [entry["loss"] for entry in log if "loss" in entry]
    history = [entry["eval_val_cosine_map@100"] for entry in log if "eval_val_cosine_map@100" in entry]
    return change(model, before, expected), worst(logged[-1:], losses[-1:]), history


def pooled(rank: int, script: str, folder: str, columns: list[str]) -> float:
    """Return the error of the parameters after windows of two micro-batches and of one."""
    from datasets import Dataset

    model, reference = make_model(), make_model()
    before, texts = flat(model), make_texts(40, 0)
    seen: list[list[Any]] = [[]]
    rows = {"anchor": texts["text"], "positive": make_texts(40, 1)["text"], "label": texts["label"]}
    rows |= {"first": make_texts(40, 2)["text"], "second": make_texts(40, 3)["text"]}

    class Recorded:
        def training_step(self: Any, model: Any, inputs: Any, *args: Any) -> Any:
            given, labels = self.collect_features(inputs)
            seen[-1].append(([{**one} for one in given], labels))
            if self.accelerator.sync_gradients:
                seen.append([])
            return super().training_step(model, inputs, *args)  # type: ignore[misc]

    script = script.replace("(PooledLossMixin, ", "(Recorded, PooledLossMixin, ")
    names = run_block(IMPORTS, {}) | {
        "model": model,
        "pairs": Dataset.from_dict({name: rows[name] for name in columns}),
        "Recorded": Recorded,
    }
    options = {"per_device_train_batch_size": 4, "eval_on_start": False, "num_train_epochs": 1, "learning_rate": 0.5}
    options |= {"optim": "sgd", "eval_strategy": "no", "save_strategy": "no"}
    names["SentenceTransformerTrainingArguments"] = partial(make_arguments, folder, options)
    names["SupConLoss"] = SupConLoss
    loss_fn = run_block(script, names)["loss_fn"]
    loss_fn.gather_distributed = False
    windows = [[batch for one in both for batch in one] for both in zip(*gathered(seen[:-1]))]
    assert [len(window) for window in windows] == [4, 4, 2]

    def loss(epoch: int, step: int, chosen: list[int]) -> Tensor:
        parts = [[reference(one)["sentence_embedding"] for one in features] for features, _ in windows[step]]
        embeddings = [torch.cat(column) for column in zip(*parts)]
        if len(embeddings) == 4:  # two hard negatives of each anchor
            embeddings[2:] = [torch.cat(embeddings[2:])]
        labels = [labels for _, labels in windows[step] if labels is not None]
        return loss_fn(*embeddings, *([torch.cat(labels)] if labels else []))

    expected, *_ = train(reference, loss, [[[]] * len(windows)], max_norm=1.0)
    return change(model, before, expected)


ALONE = SCRIPT.replace("RetrievalAPLoss(model)", "RetrievalAPLoss(model, gather_distributed=False)")


@pytest.mark.parametrize("script", [SCRIPT, pytest.param(ALONE, marks=pytest.mark.full)], ids=["page", "control"])
def test_it_trains_as_one_process(workers: WorkerPool, tmp_path: Any, script: str) -> None:
    """The control compares the texts of one rank."""
    for parameters, loss, history in workers(trained, script, str(tmp_path), {}):
        assert parameters > 0.01 if script == ALONE else parameters <= LIMIT
        assert script == ALONE or loss <= 1e-4  # the trainer rounds what it logs
        assert history[0] < history[1]  # the first epoch improves the metric
    assert any(path.name.startswith("checkpoint-") for path in tmp_path.iterdir())


@pytest.mark.parametrize("form", ["pairs", "negatives", pytest.param("labels", marks=pytest.mark.full)])
def test_pooled_micro_batches_train_as_one_process(workers: WorkerPool, tmp_path: Any, form: str) -> None:
    """The control compares the texts of one rank."""
    script, columns = POOLED, ["anchor", "positive"]
    if form == "negatives":
        columns += ["first", "second"]
    if form == "labels":
        script, columns = POOLED.replace("InfoNCELoss(temperature=0.05)", "SupConLoss(temperature=0.05)"), columns[:1]
        columns += ["label"]
    alone = script.replace("temperature=0.05", "temperature=0.05, gather_distributed=False")
    for error_of_all, wrong in zip(*(workers(pooled, one, str(tmp_path), columns) for one in (script, alone))):
        assert error_of_all <= 1e-12
        assert wrong > 0.01


class Encoder(nn.Module):
    """Stands for a model: it returns what sentence-transformers' models return."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 3).double()

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": self.layer(features["x"])}


NUMBERS = torch.arange(12)


@pytest.mark.parametrize(
    ("labels", "is_right"),
    [
        ([NUMBERS] * 2, True),
        ([NUMBERS] * 2 + [NUMBERS + 12, NUMBERS + 24], True),  # negatives of each text alone
        ([NUMBERS] * 3, False),  # the control: they are no positives
    ],
    ids=["pairs", "negatives", "control"],
)
@on_ranks(2)
def test_rows_without_labels_are_those_of_one_process(rank: int, labels: list[Tensor], is_right: bool) -> None:
    """5 rows on rank 0 and 7 on rank 1."""
    columns = normal(len(labels), 12, 4, seed=1)
    own = slice(0, 5) if rank == 0 else slice(5, 12)
    encoder, reference = Encoder(), Encoder()
    loss = RetrievalAPLoss(DistributedDataParallel(encoder), 0.1)
    loss([{"x": column[own]} for column in columns]).backward()
    embeddings = reference({"x": columns.flatten(0, 1)})["sentence_embedding"]
    RetrievalSmoothAPLoss(0.1, gather_distributed=False)(embeddings, torch.cat(labels)).backward()
    wrong = error(encoder.layer.weight.grad, reference.layer.weight.grad)
    assert wrong <= 1e-12 if is_right else wrong > 0.01


ROWS = {"x": torch.zeros(2, 4, dtype=torch.float64)}
INTEGERS = torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("number", "labels", "error", "text"),
    [
        (2, torch.tensor([0.3, 0.9]), ValueError, "labels: expected none with 2 columns of texts.*no scores of pairs"),
        (2, INTEGERS, ValueError, "labels: expected none with 2 columns of texts.*no scores of pairs"),
        (2, None, ValueError, "queue_size with 2 columns of texts: expected 0, got 8"),
        (1, torch.tensor([0.2, 0.9]), TypeError, "labels: expected integers, got a float32 tensor"),
        (1, None, ValueError, "labels: expected 2, one for each text"),
        (1, torch.tensor([0, 1, 1]), ValueError, "labels: expected 2, one for each text"),
        (1, INTEGERS, None, ""),
    ],
)
def test_labels_that_do_not_fit(number: int, labels: Tensor | None, error: Any, text: str) -> None:
    """Those of several columns are the columns; a queue needs labels that last."""
    loss = RetrievalAPLoss(Encoder(), queue_size=8)
    with pytest.raises(error, match=text) if error else contextlib.nullcontext():
        loss([ROWS] * number, labels)
    assert len(loss.ranking.queue) == (0 if error else 2)


def test_labels_may_be_a_column() -> None:
    loss, rows = RetrievalAPLoss(Encoder()), torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).double()
    labels = torch.tensor([[0], [1], [0], [1]])
    embeddings = loss.model({"x": rows})["sentence_embedding"]
    assert torch.equal(loss([{"x": rows}], labels), RetrievalSmoothAPLoss()(embeddings, labels[:, 0]))
    assert loss.get_config_dict() == {"temperature": 0.01}
