"""Every public module with state, inside a model, through every saver: the next losses are those of the saved one."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import integration_cases as cases
import pytest
import torch
from loss_cases import FORMS, normal
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from workers import WorkerPool

import fullrank
from fullrank import losses

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*drawn down", "ignore:.*parallel:UserWarning", "ignore::FutureWarning"),
]

SIZE, WIDTH = 16, 4  # rows of a step, columns of the model


CALLED: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "pooled": lambda loss, out, labels: loss(out[:, :1], labels[:, None]),
    "labelled": lambda loss, out, labels: loss(out, labels),
    "paired": lambda loss, out, labels: loss(out[:, :2], out[:, 2:]),
    "ranked": lambda loss, out, labels: loss(out[:, 0], labels, indexes=torch.arange(len(out)) // 8),
}
POOL = {"num_classes": 1, "queue_size": 40, "max_pool_size": 30}
Make = Callable[[], Any]
MODULES: dict[str, tuple[Make, str]] = {
    "smooth_ap": (lambda: losses.SmoothAPLoss(**POOL), "pooled"),
    "recall": (lambda: losses.RecallAtQuantileLoss(**POOL, surrogate="sigmoid"), "pooled"),
    "pauc": (lambda: losses.PAUCAtBudgetLoss(**POOL, surrogate="pairwise"), "pooled"),
    "ndcg": (lambda: losses.NDCGLoss(), "ranked"),
    "info_nce": (lambda: losses.InfoNCELoss(queue_size=40, num_features=2), "paired"),
    "info_nce_learned": (lambda: losses.InfoNCELoss(learn_temperature=True, queue_size=40, num_features=2), "paired"),
    "sup_con": (lambda: losses.SupConLoss(queue_size=40, num_features=WIDTH), "labelled"),
    "retrieval": (lambda: losses.RetrievalSmoothAPLoss(queue_size=40, num_features=WIDTH), "labelled"),
    "siglip": (lambda: losses.SigLIPLoss(learn=False), "paired"),
    "combined": (
        lambda: losses.CombinedLoss({"ce": losses.BCEWithLogitsLoss(), "ap": losses.SmoothAPLoss(**POOL)}),
        "pooled",
    ),
    "warm-up": (
        lambda: losses.LossWarmupWrapper(
            losses.BCEWithLogitsLoss(), losses.SmoothAPLoss(**POOL), 0, 0.5, 0.1, 20, warmup_steps=1, blend_steps=8
        ),
        "pooled",
    ),
    "sharded": (lambda: fullrank.large.ShardedLoss(losses.SmoothAPLoss(1)), "pooled"),
}
# One of each kind of state: queue, draws and temperature; a parameter; weights; a schedule.
KINDS = ("smooth_ap", "info_nce_learned", "combined", "warm-up")


def assign(name: str, loss: Any, number: float) -> Any:
    """Assign the temperature or the weights of a loss, so that a new one has their keys."""
    if name == "combined":
        loss.weights = {"ce": 1.0, "ap": number}
    elif name not in ("warm-up", "info_nce_learned"):
        (loss.loss if name == "sharded" else loss).temperature = 0.1 * number
    return loss


def make_loss(name: str) -> Any:
    return assign(name, MODULES[name][0](), 2.0)


@functools.cache
def model_class() -> Any:
    """Return a model of transformers with a loss, which every other saver takes too."""
    transformers = pytest.importorskip("transformers")

    class Config(transformers.PretrainedConfig):
        model_type = "with_loss"
        loss = "smooth_ap"

    class Model(transformers.PreTrainedModel):
        config_class = Config

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.net = nn.Linear(8, WIDTH)
            self.loss_fn = make_loss(config.loss)
            self.post_init()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            if isinstance(self.loss_fn, losses.LossWarmupWrapper):
                self.loss_fn.on_train_batch_start(self.loss_fn.saved_step.item() + 1)
            out = self.net(x)
            return {"loss": CALLED[MODULES[self.config.loss][1]](self.loss_fn, out, labels), "logits": out}

    for made in (Config, Model):  # so that they can be pickled
        made.__qualname__ = made.__name__
        setattr(sys.modules[__name__], made.__name__, made)
    return Model


def make_model(name: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = model_class().config_class(loss=name)
    return model_class()(config).train()


def rows(index: int) -> dict[str, Tensor]:
    return {"x": normal(SIZE, 8, seed=index).float(), "labels": (torch.arange(SIZE) % 4 == index % 2).long()}


def steps(model: Any, *indices: int) -> list[float]:
    return [model(**rows(index))["loss"].item() for index in indices]


def trained(name: str) -> Any:
    model = make_model(name)
    steps(model, 0, 1, 2, 3)
    assign(name, model.loss_fn, 3.0)
    return model


# Each takes a trained model, a new one and a folder, and returns a model with the state of the first.


def by_torch(model: Any, new: Any, folder: Path) -> Any:
    torch.save(model.state_dict(), folder / "state.pt")
    new.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
    return new


def by_safetensors(model: Any, new: Any, folder: Path) -> Any:
    from safetensors.torch import load_file, save_file

    save_file(model.state_dict(), folder / "state.safetensors")
    new.load_state_dict(load_file(folder / "state.safetensors"))
    return new


def by_model_of_safetensors(model: Any, new: Any, folder: Path) -> Any:
    from safetensors.torch import load_model, save_model

    save_model(model, str(folder / "model.safetensors"))
    assert load_model(new, str(folder / "model.safetensors")) == (set(), [])
    return new


def by_transformers(model: Any, new: Any, folder: Path) -> Any:
    model.save_pretrained(folder)
    loaded, info = type(model).from_pretrained(folder, output_loading_info=True)
    # The wrapper has the temperature too, so that a new main loss without the key loses nothing.
    assert not any(info[kind] - {"loss_fn.main_loss.saved_temperature"} for kind in ("missing_keys", "unexpected_keys"))
    assert [name for name, _ in loaded.named_parameters()] == [name for name, _ in model.named_parameters()]
    return loaded.train()


def by_accelerate(model: Any, new: Any, folder: Path) -> Any:
    from accelerate import Accelerator

    cases.reset_accelerate()
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model)
    accelerator.save_state(str(folder))
    cases.reset_accelerate()
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(new)
    accelerator.load_state(str(folder))
    return new


def by_model_of_accelerate(model: Any, new: Any, folder: Path) -> Any:
    from accelerate import Accelerator, load_checkpoint_in_model

    cases.reset_accelerate()
    Accelerator(cpu=True).save_model(model, str(folder))
    load_checkpoint_in_model(new, str(folder), strict=True)
    return new


def by_lightning(model: Any, new: Any, folder: Path) -> Any:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.connect(Module(model))
    trainer.save_checkpoint(folder / "model.ckpt")
    return Module.load_from_checkpoint(folder / "model.ckpt", model=new, weights_only=True).model


def by_distributed_checkpoint(model: Any, new: Any, folder: Path) -> Any:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    state = get_model_state_dict(new)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(new, state)
    return new


def by_average(model: Any, new: Any, folder: Path) -> Any:
    from torch.optim.swa_utils import AveragedModel

    averaged = AveragedModel(new)
    averaged.load_state_dict(AveragedModel(model).state_dict())
    return averaged.module


def by_earlier_version(model: Any, new: Any, folder: Path) -> Any:
    """The dicts that earlier versions wrote, in a file that torch loads with ``weights_only``."""
    state = {key: value for key, value in model.state_dict().items() if "saved_" not in key}
    for name, module in model.named_modules():
        if isinstance(module, (losses.LossWarmupWrapper, losses.CombinedLoss, fullrank.losses.base.CurrentTemperature)):
            state[f"{name}._extra_state"] = extra_state(module)
        elif isinstance(module, fullrank.queues.MemoryQueue):
            state[f"{name}._extra_state"] = extra_state_of_queue(module)
    torch.save(state, folder / "state.pt")
    new.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
    return new


def extra_state(loss: Any) -> dict[str, Any]:
    if isinstance(loss, losses.CombinedLoss):
        return {"weights": dict(loss.weights)}
    if isinstance(loss, losses.LossWarmupWrapper):
        position = {name: getattr(loss, f"_{name}") for name in ("epoch", "step", "switch_step")}
        position = {name: -1 if number is None else number for name, number in position.items()}
        return {**position, "temperature": loss.main_loss.temperature}
    temperature = loss.temperature if loss.has_temperature else None
    state = {"temperature": -1.0 if temperature is None else temperature}
    return state | ({"num_draws": loss._num_draws} if isinstance(loss, losses.RankingLoss) else {})


def extra_state_of_queue(queue: Any) -> dict[str, Any]:
    from fullrank.queues.memory_queue import _digest

    pointer, fill, enqueued, weighted = queue.position
    names = ("capacity", "num_classes", "keep", "multi_hot", "ignore_index")
    return {name: getattr(queue, name) for name in names} | {
        "logits": queue._ring.logits.double(),
        "targets": queue._ring.targets.clone(),
        "iid_mask": queue._ring.iid_mask.clone(),
        "sample_weight": queue._ring.sample_weight.double(),
        "is_double": queue._ring.logits.dtype == torch.float64,
        "checksum": queue.checksum.clone(),
        "fill": fill,
        "pointer": pointer,
        "num_enqueued": enqueued,
        "has_weights": weighted,
        "contents": f"{_digest(queue.position, queue.rows(), queue.checksum) + 2**63:016x}",
    }


SAVERS: dict[str, Callable[[Any, Any, Path], Any]] = {
    "torch": by_torch,
    "safetensors": by_safetensors,
    "safetensors_model": by_model_of_safetensors,
    "transformers": by_transformers,
    "accelerate": by_accelerate,
    "accelerate_model": by_model_of_accelerate,
    "lightning": by_lightning,
    "dcp": by_distributed_checkpoint,
    "averaged": by_average,
    "deepcopy": lambda model, new, folder: copy.deepcopy(model),
    "pickle": lambda model, new, folder: pickle.loads(pickle.dumps(model)),
    "earlier": by_earlier_version,
}


# Every module by its state_dict, and every other saver with two kinds of state in turn.
SAVED = [(name, "torch") for name in MODULES]
SAVED += [(KINDS[(turn + more) % 4], saver) for turn, saver in enumerate([*SAVERS][1:]) for more in (0, 1)]


@pytest.mark.parametrize(("name", "saver"), SAVED)
def test_the_next_losses_are_those_of_the_saved_model(name: str, saver: str, tmp_path: Path) -> None:
    model = trained(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the frameworks
        loaded = SAVERS[saver](model, make_model(name, seed=1), tmp_path)
    without = make_model(name)  # the control: the weights alone
    weights = {key: value for key, value in model.state_dict().items() if "saved_" not in key}
    without.load_state_dict(weights, strict=False)
    wanted = steps(model, 4, 5, 6)
    assert steps(loaded, 4, 5, 6) == wanted
    assert steps(without, 4, 5, 6) != wanted


FRAMEWORK = ["transformers.modeling_utils"]
# Each kind of state in a model whose net is under FSDP2, and in another wrapper.
WRAPPED = [(name, "fsdp of the net") for name in (*KINDS, "sup_con")]
WRAPPED += zip(KINDS, ("ddp", "fsdp", "compile", "fsdp"))


@pytest.mark.parametrize(("name", "wrapper"), WRAPPED)
def test_a_wrapped_model(workers: WorkerPool, name: str, wrapper: str, tmp_path: Path) -> None:
    workers(loads_wrapped, name, wrapper, tmp_path)


def loads_wrapped(rank: int, name: str, wrapper: str, tmp_path: Path) -> None:
    """By name, and from the full state that rank 0 alone has: the others receive the state of the loss too."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
    from torch.nn.parallel import DistributedDataParallel

    def wrapped(seed: int) -> tuple[Any, Any]:
        model = make_model(name, seed)
        if "fsdp" in wrapper:
            fully_shard(model if wrapper == "fsdp" else model.net)
            return model, model
        return model, DistributedDataParallel(model) if wrapper == "ddp" else torch.compile(model, backend="eager")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, outer = wrapped(0)
        steps(model, 2 + rank, 4 + rank)
        dcp.save(get_model_state_dict(outer), checkpoint_id=tmp_path)
        full = get_model_state_dict(outer, options=StateDictOptions(full_state_dict=True))
        # torch does not add its prefix to a key that the new model lacks. The schedule has the temperature too.
        full.pop("loss_fn.main_loss.saved_temperature", None)
        loaded = []
        for way in ("by name", "broadcast"):
            new, outer = wrapped(1)
            if way == "by name":
                state = get_model_state_dict(outer)
                dcp.load(state, checkpoint_id=tmp_path)
                set_model_state_dict(outer, state)
            else:
                scatter = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
                set_model_state_dict(outer, full if rank == 0 else {}, options=scatter)
            loaded.append(steps(new, 8 + rank))
        fresh = steps(wrapped(1)[0], 8 + rank)
        assert loaded == [steps(model, 8 + rank)] * 2
        assert loaded[0] != fresh


STATELESS: dict[str, Make] = {
    **{name: form.make for name, form in FORMS.items() if form.is_first and form.loss.module and name != "warm_up"},
    "sharded": lambda: fullrank.large.ShardedLoss(losses.SmoothAPLoss(1)),
}


@pytest.mark.parametrize("name", STATELESS)
def test_a_loss_with_nothing_to_remember_changes_no_checkpoint(name: str) -> None:
    model, with_loss = nn.ModuleDict({"net": nn.Linear(8, 1)}), nn.ModuleDict({"net": nn.Linear(8, 1)})
    with_loss["loss"] = STATELESS[name]()
    with_loss.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(with_loss.state_dict(), strict=True)
    assert with_loss.state_dict().keys() == model.state_dict().keys()


def test_control_a_queue_a_draw_and_a_schedule_have_keys() -> None:
    model = nn.ModuleDict({"net": nn.Linear(8, 1)})
    for loss in (losses.SmoothAPLoss(1, 8), losses.SmoothAPLoss(1, max_pool_size=8), make_loss("warm-up")):
        with pytest.raises(RuntimeError, match=r"Missing key\(s\) .*loss.*saved_"):
            nn.ModuleDict({**model, "loss": loss}).load_state_dict(model.state_dict())
        with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) .*loss.*saved_"):
            model.load_state_dict(nn.ModuleDict({**model, "loss": loss}).state_dict())


def test_from_pretrained_of_a_checkpoint_without_a_loss(tmp_path: Path) -> None:
    """The loss is new, and the missing keys are reported."""
    from safetensors.torch import save_file

    model = trained("smooth_ap")
    model.save_pretrained(tmp_path)
    weights = {key: value for key, value in model.state_dict().items() if "saved_" not in key}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == model.state_dict().keys() - weights.keys()
    assert len(loaded.loss_fn.queue) == 0
    assert loaded.loss_fn.temperature == make_loss("smooth_ap").temperature
    assert [*loaded.parameters()] == [loaded.net.weight, loaded.net.bias]
    steps(loaded.train(), 0)
    assert len(loaded.loss_fn.queue) == SIZE


def test_a_loaded_queue_shares_no_memory_with_the_checkpoint() -> None:
    def enqueue(queue: Any, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        scores, weight = (torch.rand(6, generator=generator) for _ in range(2))
        queue.enqueue(scores[:, None], torch.arange(6) % 2, sample_weight=weight)

    saved, loaded = (fullrank.queues.MemoryQueue(8, 1) for _ in range(2))
    enqueue(saved, 0)
    state = saved.state_dict()
    kept = copy.deepcopy(state)
    loaded.load_state_dict(state)
    for queue in (loaded, saved):
        enqueue(queue, 1)
    assert state.keys() == kept.keys()
    assert all(torch.equal(state[name], kept[name]) for name in kept)
    assert not torch.equal(saved.state_dict()["saved_sample_weight"], kept["saved_sample_weight"])  # control


def test_a_temperature_that_a_new_loss_has_no_key_for_is_restored() -> None:
    """And without a key the temperature is that of the constructor, whatever was assigned since."""
    loss, new = losses.SmoothAPLoss(1, temperature=0.4), losses.SmoothAPLoss(1, temperature=0.4)
    before = loss.state_dict()
    for temperature in (0.1, None):
        loss.temperature = temperature
        assert [*new.state_dict()] == []
        new.load_state_dict(loss.state_dict())
        assert new.temperature == temperature
        new.load_state_dict(before)
        assert new.temperature == 0.4
    learned = losses.InfoNCELoss(learn_temperature=True)
    state = learned.state_dict() | {"saved_temperature": torch.tensor(0.1)}
    with pytest.raises(RuntimeError, match="Unexpected key"):
        learned.load_state_dict(state)


def test_a_schedule_restores_the_temperature_that_a_new_main_loss_has_no_key_for() -> None:
    """Before its next step too, from the keys that ``torch.distributed.checkpoint`` reads."""
    loss, new = trained("warm-up").loss_fn, make_loss("warm-up")
    new.load_state_dict({key: value for key, value in loss.state_dict().items() if key in new.state_dict()})
    assert new.main_loss.temperature == loss.main_loss.temperature != make_loss("warm-up").main_loss.temperature
