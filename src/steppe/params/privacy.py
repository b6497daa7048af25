"""Client-level differential privacy: clip deltas in float64, sum with equal weight, add noise, divide by a constant.

Every release is charged to a ledger on disk before it is published, and refused if it would exceed the budget.
dp-accounting computes ε. The server decides who may participate; privacy amplification is claimed only for clients that
the server sampled itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import secrets
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from steppe.core.contracts.errors import BudgetSpent, ConfigError, Conflict, DamagedFile, MissingExtra, UsageError
from steppe.core.io import atomic_files
from steppe.params import kernels

FORMAT = 1
BLOCK = 1 << 17  # columns whose noise is sampled at a time
_SHRINK = 1.0 - 2.0**-40  # keeps a clipped norm below its limit despite rounding
MOST_RELEASES = 10_000_000  # largest planned number: beyond it, rounding errors of the accounting accumulate
MOST_NOISE = 2**40 / 1000  # largest noise multiplier


@dataclass(frozen=True)
class PrivacyPlan:
    """The privacy guarantee: (`epsilon`, `delta`) for each client, over all releases that `ledger` has ever recorded.

    `clip_norm`: the L2 norm to which a client's delta is clipped. `expected_clients`: the divisor of a round's sum,
    however many clients pushed. `sampling_rate` below 1: the server samples each round's clients itself, which spends
    less ε.
    """

    ledger: str | Path
    epsilon: float
    expected_clients: int
    delta: float = 1e-5
    clip_norm: float = 1.0
    sampling_rate: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.epsilon < math.inf or not 0.0 < self.delta < 1.0:
            raise ConfigError(f"epsilon={self.epsilon}, delta={self.delta}: epsilon above 0, delta between 0 and 1")
        if self.expected_clients < 1 or not 0.0 < self.clip_norm < math.inf:
            raise ConfigError("expected_clients is at least 1, and clip_norm above 0")
        if not 0.0 < self.sampling_rate <= 1.0:
            raise ConfigError(f"sampling_rate={self.sampling_rate} must be above 0 and at most 1")


class Charge(msgspec.Struct, frozen=True):
    """Releases of one kind: Gaussian noise of `noise_multiplier` × clip_norm, clients sampled with `sampling_rate`."""

    noise_multiplier: float
    sampling_rate: float
    releases: int


def epsilon_of(charges: Iterable[Charge], delta: float) -> float:
    """Return ε of all these releases together: exact if every client participated, Rényi accounting otherwise."""
    accounting = _accounting()
    made = [charge for charge in charges if charge.releases]
    if not made:
        return 0.0
    if all(charge.sampling_rate == 1.0 for charge in made):
        precision = sum(charge.releases / charge.noise_multiplier**2 for charge in made)
        return float(accounting.get_epsilon_gaussian(1.0 / math.sqrt(precision), delta))
    accountant = accounting.rdp.RdpAccountant(neighboring_relation=accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    for charge in made:
        noise = accounting.GaussianDpEvent(charge.noise_multiplier)
        event = accounting.PoissonSampledDpEvent(charge.sampling_rate, noise)
        accountant.compose(event if charge.sampling_rate < 1.0 else noise, charge.releases)
    return float(accountant.get_epsilon(delta))


def epsilon_after(noise_multiplier: float, releases: int, delta: float, sampling_rate: float = 1.0) -> float:
    """Return ε of `releases` equal releases."""
    _require_noise("noise_multiplier", noise_multiplier)
    return epsilon_of([Charge(noise_multiplier, sampling_rate, releases)], delta)


def releases_within(noise_multiplier: float, epsilon: float, delta: float, sampling_rate: float = 1.0) -> int:
    """Return how many equal releases stay within ε; raise UsageError for `MOST_RELEASES` or more."""

    def fits(releases: int) -> bool:
        return epsilon_after(noise_multiplier, releases, delta, sampling_rate) <= epsilon

    low, high = 0, 1
    while fits(high):
        if high == MOST_RELEASES:
            raise UsageError(
                f"{MOST_RELEASES:,} releases or more stay within epsilon={epsilon:g} with noise_multiplier={noise_multiplier:g}: "
                "choose less noise, or a smaller epsilon"
            )
        low, high = high, min(2 * high, MOST_RELEASES)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def noise_needed(releases: int, epsilon: float, delta: float, sampling_rate: float = 1.0) -> float:
    """Return the smallest noise multiplier, to a thousandth, with which `releases` releases stay within ε."""

    def fits(thousandths: int) -> bool:
        return epsilon_after(thousandths / 1000, releases, delta, sampling_rate) <= epsilon

    low, high = 0, 1000
    while not fits(high):
        low, high = high, 2 * high
        if high > 1000 * MOST_NOISE:
            raise UsageError(f"no noise brings {releases} releases within epsilon={epsilon}")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high / 1000


class PrivacyLedger:
    """All charges ever made, in a file that one process locks. `released` is the newest published charge."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.charges: list[Charge] = []
        self.count = 0
        self.released = 0
        self._lock: int | None = _lock_ledger(path)
        try:
            if path.exists():
                self._read()
        except BaseException:
            self.close()
            raise

    def charge(self, noise_multiplier: float, sampling_rate: float, plan: PrivacyPlan) -> int:
        """Record one release on disk before it is made; return its number.

        Raises BudgetSpent, and writes nothing, if the release would exceed the budget.
        """
        if self._lock is None:
            raise UsageError(f"the ledger {self.path} was closed: nothing can be released any more")
        charges = _append_charge(self.charges, noise_multiplier, sampling_rate)
        spent = epsilon_of(charges, plan.delta)
        if not spent <= plan.epsilon:
            raise BudgetSpent(
                f"the next release would bring epsilon to {spent:.4g}, above the budget of {plan.epsilon:g} "
                f"(delta={plan.delta:g}, {self.count} releases so far): stop here, or decide on a larger budget"
            )
        self._write(charges, self.count + 1, self.released)
        return self.count

    def mark_released(self, number: int) -> None:
        """Mark a release as published; checkpoints from before it are rejected from now on."""
        self._write(self.charges, self.count, number)

    def require(self, released: int) -> None:
        """Raise UsageError for a checkpoint that does not include the newest release."""
        if released < self.released:
            raise UsageError(
                f"the checkpoint has release {released}, but the ledger {self.path} says that release {self.released} is "
                "out: load a newer checkpoint, or begin again from public parameters with the same ledger"
            )

    def close(self) -> None:
        """Release the lock, so that another process can use the ledger."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _write(self, charges: list[Charge], count: int, released: int) -> None:
        body = {"format": FORMAT, "count": count, "released": released, "charges": msgspec.to_builtins(charges)}
        with atomic_files.raising_disk_full(self.path):
            atomic_files.write_json(self.path, {**body, "sha256": _digest(body)})
        self.charges, self.count, self.released = charges, count, released

    def _read(self) -> None:
        found = atomic_files.read_json(self.path)
        try:
            digest = found.pop("sha256")
            if digest != _digest(found) or found["format"] > FORMAT:
                raise ValueError("its checksum or format does not match")
            self.charges = msgspec.convert(found["charges"], list[Charge])
            self.count, self.released = int(found["count"]), int(found["released"])
            if self.count != sum(charge.releases for charge in self.charges):
                raise ValueError("its count does not match")
        except (msgspec.MsgspecError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise DamagedFile(
                f"the privacy ledger {self.path} is damaged ({error}): what was spent is unknown, so nothing more may be "
                "released to these clients; bring back an intact copy"
            ) from None


class PrivateSum:
    """Turn a round's deltas into one release. `noise_multiplier` is z: the sum's noise has deviation z · clip_norm."""

    def __init__(
        self, plan: PrivacyPlan, noise_multiplier: float, entropy: Callable[[int], bytes] | None = None
    ) -> None:
        _require_noise("noise_scale", noise_multiplier)
        _accounting()
        self.plan = plan
        self.noise_multiplier = noise_multiplier
        self.ledger = PrivacyLedger(Path(plan.ledger))
        self._entropy = entropy

    def release(self, updates: np.ndarray) -> tuple[np.ndarray, int]:
        """Return the noisy mean delta over the expected clients, and the number of its charge, which is on disk."""
        number = self.ledger.charge(self.noise_multiplier, self.plan.sampling_rate, self.plan)
        size, clients = updates.shape[1], float(self.plan.expected_clients)
        out = np.empty(size, np.float32)
        with ThreadPoolExecutor(1) as pool:  # noise takes as long as all the rest: overlap it with clipping and summing
            starts = range(0, size, BLOCK)
            drawn = [pool.submit(self._noise, min(BLOCK, size - start)) for start in starts]
            scales = clip_scales(updates, self.plan.clip_norm)
            for start, noise in zip(starts, drawn, strict=True):
                kernels.noisy_sum(updates, scales, noise.result(), start, clients, out)
        return out, number

    def draw(self, workers: Iterable[str]) -> set[str]:
        """Return the workers that participate in a round, each sampled independently with `sampling_rate`."""
        if self.plan.sampling_rate == 1.0:
            return set(workers)
        chance = secrets.SystemRandom().random
        return {worker for worker in workers if chance() < self.plan.sampling_rate}

    def report(self) -> dict[str, Any]:
        """Return the budget spent so far; nothing about individual clients."""
        plan = self.plan
        return {
            "epsilon_spent": epsilon_of(self.ledger.charges, plan.delta),
            "epsilon_budget": plan.epsilon,
            "delta": plan.delta,
            "releases": self.ledger.count,
            "noise_multiplier": self.noise_multiplier,
            "clip_norm": plan.clip_norm,
            "expected_clients": plan.expected_clients,
            "sampling_rate": plan.sampling_rate,
        }

    def _noise(self, size: int) -> np.ndarray:
        """Return noise for one block of columns: `size` normal numbers, rounded up to an even count."""
        draw = os.urandom if self._entropy is None else self._entropy
        words = np.frombuffer(draw(8 * (size + size % 2)), np.uint64)
        noise = np.empty(len(words), np.float64)
        kernels.normal_numbers(words, self.noise_multiplier * self.plan.clip_norm, noise)
        return noise


def clip_scales(updates: np.ndarray, clip_norm: float) -> np.ndarray:
    """Return the factors that clip each delta's norm to at most `clip_norm`; 1 for deltas below it."""
    norms = np.array([math.sqrt(kernels.squared_norm(update)) for update in updates])
    if not np.isfinite(norms).all():
        raise UsageError("a delta has NaN or infinity: it cannot be clipped")
    return np.where(norms > clip_norm, clip_norm * _SHRINK / np.maximum(norms, clip_norm), 1.0)


def _require_noise(name: str, noise_multiplier: float) -> None:
    """Raise ConfigError unless the noise is above 0 and at most MOST_NOISE; more would leave nothing of the deltas."""
    if not noise_multiplier > 0.0:
        raise ConfigError(f"{name}={noise_multiplier} must be above 0: without noise nothing is private")
    if noise_multiplier > MOST_NOISE:
        raise ConfigError(
            f"{name}={noise_multiplier} must be at most {MOST_NOISE:.2g}: more noise leaves nothing of the deltas"
        )


def _append_charge(charges: list[Charge], noise_multiplier: float, sampling_rate: float) -> list[Charge]:
    last = charges[-1] if charges else None
    if last is not None and (last.noise_multiplier, last.sampling_rate) == (noise_multiplier, sampling_rate):
        return [*charges[:-1], Charge(noise_multiplier, sampling_rate, last.releases + 1)]
    return [*charges, Charge(noise_multiplier, sampling_rate, 1)]


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _lock_ledger(path: Path) -> int:
    """Lock the file beside the ledger and return its descriptor; the lock ends with the process, however it exits."""
    if not path.parent.is_dir():
        raise ConfigError(f"there is no directory {path.parent} for the privacy ledger: make it first")
    descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        with contextlib.suppress(OSError):
            os.close(descriptor)
        raise Conflict(f"the privacy ledger {path} is in use by another server: one server per ledger") from None
    return descriptor


def _accounting() -> Any:
    try:
        import dp_accounting
    except ImportError as error:
        raise MissingExtra("differential privacy", "privacy") from error
    return dp_accounting
