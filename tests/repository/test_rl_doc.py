"""Every block of docs/rl.md on three uneven ranks gives the gradient that one process has with all sequences."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pages
import pytest
import torch
import torch.nn.functional as F
from on_ranks import on_ranks
from pages import run_block
from subjects import error, gradient
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fullrank

pytestmark = pytest.mark.slow

LIMIT = 1e-12  # float64
SIZES = ((3, 1), (2, 4, 1), (1,))  # sequences in the micro-batches of each rank
WORDS, WIDTH, LENGTH = 11, 6, 9
Batch = dict[str, Any]
blocks = partial(pages.blocks, "rl.md")
NAMES = blocks()[0]
LINEAR, LAYOUT = blocks("Without logits")
POLICY, NORMALIZED = blocks("Policy gradients")
ADVANTAGES, PROMPTS = blocks("Prompts whose group crosses processes")
(WHITENED,) = blocks("Whitening")
(DYNAMIC,) = blocks("Processes with different numbers of micro-batches")
(BAD,) = blocks("A bad micro-batch")
(METRICS,) = blocks("Metrics of a window")
(PREFERENCES,) = blocks("Preferences")
ACTOR_CRITIC, JOINT = blocks("Two models in one step")
(BALANCE,) = blocks("Balance of a router over the global batch")


class Policy(nn.Module):
    """Returns hidden states that depend on the tokens before; the head is called by the losses alone."""

    def __init__(self, head: type[nn.Linear] = nn.Linear, seed: int = 0, experts: int = 0) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(WORDS, WIDTH), nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.head = head(WIDTH, WORDS, bias=False)
        self.router = nn.Linear(WIDTH, experts) if experts else None
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.double().parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2

    def forward(self, tokens: Tensor) -> Any:
        embedded = self.embed(tokens)
        counts = torch.arange(1, tokens.shape[1] + 1, dtype=embedded.dtype)[:, None]
        hidden = torch.tanh(self.layers[0](embedded + embedded.cumsum(1) / counts))
        return hidden if self.router is None else (hidden, self.router(hidden).softmax(-1))


def make_data() -> list[list[Batch]]:
    """Return the micro-batches of each rank; four prompts, whose sequences are on several ranks."""
    generator, data, number = torch.Generator().manual_seed(3), [], 0
    for sizes in SIZES:
        data.append([])
        for size in sizes:
            tokens, other = torch.randint(0, WORDS, (2, size, LENGTH), generator=generator)
            lengths = torch.randint(1, LENGTH - 1, (2, size), generator=generator)
            masks = [(torch.arange(LENGTH) >= 1) & (torch.arange(LENGTH) <= each[:, None]) for each in lengths]
            numbers = [torch.randn(size, LENGTH, generator=generator, dtype=torch.float64) for _ in range(2)]
            batch = {"tokens": tokens, "mask": masks[0], "labels": tokens.masked_fill(~masks[0], -100)}
            batch |= {"prompts": (number + torch.arange(size)) // 3, "rewards": numbers[0][:, 0]}
            batch |= {"old_log_probs": -2 + 0.3 * numbers[1], "advantages": numbers[0][:, 1]}
            batch |= {"chosen": tokens, "rejected": other, "chosen_mask": masks[0], "rejected_mask": masks[1]}
            data[-1].append(batch)
            number += size
    return data


def joined(data: list[list[Batch]]) -> Batch:
    batches = [batch for own in data for batch in own]
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def log_probs(model: Policy, tokens: Tensor) -> Tensor:
    """Return those of all tokens but the first, from all logits."""
    hidden = model(tokens)
    hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    return model.head(hidden[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


def token_losses(model: Policy, batch: Batch) -> Tensor:
    """Return the losses of a policy gradient, 0 where the policy has written nothing."""
    ratio, advantages = (log_probs(model, batch["tokens"]) - batch["old_log_probs"][:, 1:]).exp(), batch["advantages"]
    each = -torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    return each * batch["mask"][:, 1:]


def mean_over_tokens(model: Policy, batch: Batch) -> Tensor:
    return token_losses(model, batch).sum() / batch["mask"][:, 1:].sum()


def cross_entropy(model: Policy, batch: Batch) -> Tensor:
    return -(log_probs(model, batch["tokens"]) * batch["mask"][:, 1:]).sum() / batch["mask"][:, 1:].sum()


def normalized(name: str, model: Policy, batch: Batch) -> Tensor:
    losses, lengths = token_losses(model, batch), batch["mask"][:, 1:].sum(1)
    if name == "mean over tokens":
        return mean_over_tokens(model, batch)
    means = {"mean over sequences of their means": losses.sum(1) / lengths, "constant": losses.sum(1) / 32}
    return means.get(name, losses.sum(1)).mean()


def with_groups(model: Policy, batch: Batch) -> Tensor:
    """The advantages within each prompt, in a loop."""
    batch = {**batch, "advantages": batch["advantages"].clone()}
    for prompt in batch["prompts"].unique():
        at = batch["prompts"] == prompt
        rewards = batch["rewards"][at]
        batch["advantages"][at] = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)
    return mean_over_tokens(model, batch)


def mean_over_prompts(model: Policy, batch: Batch) -> Tensor:
    losses, mask, prompts = token_losses(model, batch), batch["mask"][:, 1:], batch["prompts"]
    return torch.stack([losses[prompts == p].sum() / mask[prompts == p].sum() for p in prompts.unique()]).mean()


def whitened(model: Policy, batch: Batch) -> Tensor:
    rewards = batch["rewards"]
    advantages = (rewards - rewards.mean()) / (rewards.var(correction=0) + 1e-8).sqrt()
    return mean_over_tokens(model, {**batch, "advantages": advantages})


def preferences(model: Policy, batch: Batch) -> Tensor:
    (chosen, length), (rejected, other) = (
        ((log_probs(model, batch[name]) * mask).sum(1), mask.sum(1))
        for name in ("chosen", "rejected")
        for mask in [batch[f"{name}_mask"][:, 1:]]
    )
    return -F.logsigmoid(2 * (chosen / length - rejected / other)).mean() - 0.2 * chosen.sum() / length.sum()


def balanced(model: Policy, batch: Batch) -> Tensor:
    probabilities = model(batch["tokens"])[1][:, :-1].flatten(0, 1)
    shares = torch.stack([(probabilities.argmax(1) == expert).double().mean() for expert in range(3)])
    return -log_probs(model, batch["tokens"]).mean() + 0.3 * (shares * probabilities.mean(0)).sum()


class Recipe(NamedTuple):
    """Blocks, the loss of one process with all sequences, and the wrapper."""

    code: str
    loss: Callable[[Any, Batch], Tensor]
    kind: str = "ddp"


NORMALIZATIONS = (
    "mean over tokens",
    "mean over sequences of their means",
    "mean over sequences of their sums",
    "constant",
)
COUNTS = POLICY + NORMALIZED.partition("count, add_up =")[0]
OURS = 'causal_lm_loss(hidden, batch["labels"], weight=head.weight, reduction="sum")'
ROWS = 'hidden[:, :-1].flatten(0, 1), head.weight, batch["labels"][:, 1:].flatten()'
RECIPES = {
    "linear": Recipe(LINEAR, cross_entropy),
    "torch's own": Recipe(
        LINEAR.replace(OURS, f'torch.nn.functional.linear_cross_entropy({ROWS}, reduction="sum")'), cross_entropy
    ),
    "linear, fsdp": Recipe(LINEAR, cross_entropy, "root"),
    "layout": Recipe(LAYOUT, cross_entropy, "layout"),
    **{
        name: Recipe(POLICY + NORMALIZED.replace('["mean over tokens"]', f'["{name}"]'), partial(normalized, name))
        for name in NORMALIZATIONS
    },
    "groups": Recipe(ADVANTAGES + POLICY + NORMALIZED, with_groups),
    "prompts": Recipe(POLICY + PROMPTS, mean_over_prompts),
    "whitened": Recipe(WHITENED + POLICY + NORMALIZED, whitened),
    "dynamic": Recipe(COUNTS + DYNAMIC, mean_over_tokens, "root"),
    "bad": Recipe(COUNTS + BAD, mean_over_tokens),
    "metrics": Recipe(COUNTS + METRICS, mean_over_tokens),
    "preferences": Recipe(PREFERENCES, preferences),
    "balance": Recipe(BALANCE, balanced),
    "actor and critic": Recipe(ACTOR_CRITIC, cross_entropy, "two"),
    "two models, one loss": Recipe(JOINT, cross_entropy, "two"),
}


def test_every_block_is_run() -> None:
    code = "".join(recipe.code for recipe in RECIPES.values())
    assert all(block in code or block in (NAMES, NORMALIZED) for block in blocks())


class Both(nn.Module):
    """Two models, whose hidden states are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = Policy(), Policy(seed=1)
        self.head = self.actor.head

    def forward(self, tokens: Tensor) -> Tensor:
        return self.actor(tokens) + self.actor.head.weight.new_tensor(0.5) * self.critic(tokens)


def make_names(recipe: Recipe, own: list[Batch]) -> tuple[nn.Module, dict[str, Any]]:
    """Return the parameters, and the names of the blocks."""
    if recipe.kind == "two":
        both = Both()
        actor, critic = DistributedDataParallel(both.actor), DistributedDataParallel(both.critic)

        def loss_sum(model: nn.Module, head: nn.Module, batch: Batch) -> Tensor:
            return fullrank.causal_lm_loss(model(batch["tokens"]), batch["labels"], weight=head.weight, reduction="sum")

        if recipe.code == JOINT:  # the head of the critic is not used
            both.critic.head.requires_grad_(False)
            critic = DistributedDataParallel(both.critic)
        joint = lambda tokens: actor(tokens) + 0.5 * critic(tokens)  # noqa: E731
        return both, {
            "actor": actor,
            "critic": critic,
            "actor_loss_sum": partial(loss_sum, actor, both.actor.head),
            "critic_loss_sum": partial(loss_sum, critic, both.critic.head),
            "joint_loss_sum": partial(loss_sum, joint, both.actor.head),
            "micro_batches": own,
        }
    model: Any = Policy(experts=3 if recipe.code == BALANCE else 0)
    if recipe.kind == "layout":
        return model, {"model": model, "micro_batches": [*fullrank.data.until_all_end(own)]}
    if recipe.kind == "root":
        fully_shard(model.layers[0])
        fully_shard(model)
        own = own if recipe.code.endswith(DYNAMIC) else [*fullrank.data.until_all_end(own)]
        return model, {"model": model, "head": model.head, "micro_batches": own}
    wrapped = DistributedDataParallel(model)
    return model, {"model": wrapped, "routed": wrapped, "head": model.head, "micro_batches": own}


def reference_of(recipe: Recipe, data: list[list[Batch]]) -> tuple[Tensor, Tensor]:
    """Return the gradient of one process with all sequences, and of the mean over ranks of their own losses."""
    found = []
    for parts in ([data], [[own] for own in data]):
        model: Any = Both() if recipe.kind == "two" else Policy(experts=3 if recipe.code == BALANCE else 0)
        of = [model.actor, model.critic] if recipe.code == ACTOR_CRITIC else [model]
        losses = [recipe.loss(each, joined(part)) for part in parts for each in of]
        (sum(losses) / len(parts)).backward()
        found.append(gradient(model))
    return found[0], found[1]


@pytest.mark.parametrize("name", RECIPES)
@on_ranks(3)
def test_a_recipe(rank: int, name: str) -> None:
    if name == "torch's own" and not hasattr(F, "linear_cross_entropy"):
        return  # of torch 2.13
    recipe, data = RECIPES[name], make_data()
    if name == "bad":
        data[1][1]["advantages"] = data[1][1]["advantages"] * torch.nan
    code = recipe.code
    if recipe.kind == "layout":  # the model of the block has the head of the block
        before, after = code.split("\n\nfor part in", 1)
        names = run_block(NAMES + before, {})
        head, model = names["Head"], None
        model = Policy(head)
        names |= {"model": model, "micro_batches": [*fullrank.data.until_all_end(data[rank])]}
        run_block("for part in" + after, names)
    else:
        model, names = make_names(recipe, data[rank])
        run_block(NAMES + code, names)
    if name == "bad":
        del data[1][1]
    expected, means = reference_of(recipe, data)
    assert error(gradient(model), expected) <= LIMIT
    assert error(means, expected) > 1e-3, "the control: a mean over ranks"
    if name == "metrics":
        losses = token_losses(Policy(), joined(data))
        share = (losses > 0).double().sum() / joined(data)["mask"][:, 1:].sum()
        torch.testing.assert_close(names["share"], share, rtol=1e-12, atol=0)
