"""The ranks of a group: waiting for one another, with an error that names the rank that is lost.

A wait ends by an error of the backend (the other process ended, so its connection is closed) or by the timeout. Which
rank is to blame is then found through the group's key-value store (`store.py`):

- A rank that fails writes that it is alive (`alive/RANK`), so it is not taken for the lost one.
- A rank whose connection was closed blames the rank at the other end, unless that one is alive: it failed itself, and
  waits for or has the verdict.
- A rank whose wait timed out blames those that do not write within another timeout that they are alive.
- The first verdict (`lost`) counts; all others repeat it.

Ranks that make different calls are found in two ways. A form of call that is new to a rank is compared through the
store before anything is sent. In later calls of that form, the tags of messages depend on the form and on how many
calls were made, so messages of different calls do not meet: both ranks wait until the time is over, and then tell each
other which call they are in.

With NCCL, which knows no tags, a wait is one of the GPU's stream, which no error ends here: its own watchdog ends the
process, by the timeout of the group. What is found before anything is sent, ranks that differ or do not come to a new
call, is found with every backend.
"""

import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from numbers import Real
from typing import NamedTuple, NoReturn, cast

import torch.distributed as dist
from torch import Tensor

from regard.errors import ProblemError, RankError
from regard.parallel.store import Known, Store, known_of

TIMEOUT = 300.0
"""Seconds that a rank waits for another."""

GRACE = 3.0
"""Seconds in which a rank that lives writes so, after a connection to it was closed."""

RAISES = "raises "
"""Begins what a rank writes in place of its call, where that raises an error."""

TAGS = 16
"""Tags of messages are below this; the backend gets `seal * TAGS + tag`."""

SEALS = {"gloo": 1 << 27}
"""A seal is a number that tells calls apart, below this: gloo takes tags below 2^31."""

FEW_SEALS = 1 << 11
"""The same for other backends: MPI takes tags below 2^15 at least."""

CLOSED = "clos|reset|broken pipe|refused|abort|connect|read error|write error"
"""What the error of a backend whose connection is gone says."""


class Message(NamedTuple):
    """A tensor that is sent or received.

    Attributes:
        tensor: contiguous.
        peer: the other rank.
        tag: by which both ends know the message of a call, below `TAGS`.
        is_sent: whether this rank sends it.
    """

    tensor: Tensor
    peer: int
    tag: int
    is_sent: bool


class Pending(NamedTuple):
    """Transfers that were started: each with the ranks at its other end, and the tensors that it uses."""

    works: list[tuple[dist.Work, tuple[int, ...]]]
    tensors: list[Tensor]


def check_initialized(function: str) -> None:
    """Raise `ProblemError` unless there is a process group."""
    if not dist.is_available() or not dist.is_initialized():
        raise ProblemError(
            f"{function} needs a process group: call torch.distributed.init_process_group first, in a program that "
            "torchrun starts."
        )


class Ranks:
    """The ranks of a group, numbered from 0 in it.

    Args:
        group: None for all ranks.
        timeout: seconds to wait for another rank.
        function: the function that communicates, for messages.
    """

    number, text, seal = 0, "", 0  # of the call, once `agree` has begun it

    def __init__(self, group: dist.ProcessGroup | None, timeout: float, function: str) -> None:
        check_initialized(function)
        if not isinstance(cast(object, timeout), Real) or isinstance(timeout, bool) or not 0 < timeout < math.inf:
            raise ProblemError(f"timeout is {timeout!r}: expected seconds, a finite number above 0.")
        outside = cast(object, dist.GroupMember.NON_GROUP_MEMBER)  # what new_group returns to ranks that it leaves out
        if not isinstance(cast(object, group), dist.ProcessGroup | None) and cast(object, group) is not outside:
            raise ProblemError(
                f"group is {type(group).__name__}: expected a process group, or None for all ranks. A dimension of a "
                'DeviceMesh has one: mesh.get_group("name").'
            )
        self.group = cast(dist.ProcessGroup, dist.group.WORLD) if group is None else group
        if (rank := dist.get_rank(self.group)) < 0:
            raise ProblemError(f"this process (rank {dist.get_rank()}) is not in the group that {function} got.")
        self.rank, self.size = rank, dist.get_world_size(self.group)
        self.timeout, self.function = float(timeout), function
        self.known = known_of(self.group)
        if self.known.lost is not None:
            raise self.known.lost
        self.store = Store(self.group, self.known, function)

    @classmethod
    def alone(cls, timeout: float, function: str) -> "Ranks":
        """This process alone; it never waits."""
        made = object.__new__(cls)
        made.rank, made.size, made.timeout, made.function, made.known = 0, 1, timeout, function, Known()
        return made

    def agree(self, form: object, text: Callable[[], str], now: str = "") -> None:
        """Begin a call; check, if its form is new, that all ranks make the same.

        Args:
            form: of the call, hashable.
            text: makes its description, which must be equal on all ranks.
            now: more of the description, which changes from call to call of this form: after the first call it is in
                the seal alone, which NCCL does not compare.

        Raises:
            ProblemError: on every rank, where ranks differ.
            RankError: a rank did not make the call.
        """
        if self.size == 1:
            return
        self.number, known = self.known.calls, self.known.texts.get(form)
        self.known.calls += 1
        of_form = f"{self.function}: {text()}" if known is None else known
        self.text = of_form + now
        if known is None:
            self._compare()
            self.known.texts.put(form, of_form)
        sealed = hashlib.blake2b(f"{self.number} {self.text}".encode(), digest_size=8).digest()
        self.seal = int.from_bytes(sealed) % SEALS.get(dist.get_backend(self.group), FEW_SEALS)

    def refuse(self, why: str) -> None:
        """Begin a call that raises an error on this rank, and tell others so; waits for nobody."""
        if self.size > 1:
            self.store.write(f"call/{self.known.calls}/{self.rank}", f"{RAISES}{why}")
            self.known.calls += 1

    def _compare(self) -> None:
        """Raise an error unless all ranks make this call."""
        self.store.write(f"call/{self.number}/{self.rank}", self.text)
        keys = {rank: f"call/{self.number}/{rank}" for rank in range(self.size)}
        if missing := self.store.missing(keys, self.timeout):
            self._write_alive()  # to ranks that know the form, and wait for messages
            silent = self.store.missing({r: (f"alive/{r}", keys[r]) for r in missing}, self.timeout)
            if not silent:
                self._check_same()
            what = f"did not make its call {self.number + 1}, of a new form, within {self.timeout:g} s"
            self._lose(silent or missing, what)
        texts = {rank: self.store.read(key) for rank, key in keys.items()}
        if len(set(texts.values())) > 1:
            raise ProblemError(self._difference(texts.items()))

    @contextmanager
    def sending(self, messages: Sequence[Message]) -> Generator[None]:
        """Messages travel in the block, and have arrived at its end.

        An error in the block waits for them, too: half of a message would stop all that this process sends later.
        """
        pending = self.start(messages)
        try:
            yield
        except BaseException:
            with suppress(Exception):  # the next call reports a rank that is lost
                self.wait(pending)
            raise
        self.wait(pending)

    def start(self, messages: Sequence[Message]) -> Pending:
        """Start transfers; NCCL, which knows no tags, tells messages between two ranks apart by their order."""
        messages = sorted((m for m in messages if m.tensor.numel()), key=lambda m: m.tag)
        if not messages:
            return Pending([], [])
        if messages[0].tensor.is_cpu:
            return Pending([(self._started(m), (m.peer,)) for m in messages], [m.tensor for m in messages])
        ops = [
            dist.P2POp(
                dist.isend if m.is_sent else dist.irecv,
                m.tensor,
                group=self.group,
                group_peer=m.peer,
                tag=self._sealed(m.tag),
            )
            for m in messages
        ]
        peers = tuple({m.peer for m in messages})
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            self._fail(peers, error)
        if len(works) == len(messages):
            return Pending([(w, (m.peer,)) for w, m in zip(works, messages, strict=True)], [m.tensor for m in messages])
        return Pending([(w, peers) for w in works], [m.tensor for m in messages])  # NCCL: one for the whole batch

    def _started(self, message: Message) -> dist.Work:
        """One transfer: if it fails, the rank at its other end is to blame, and no rank of another transfer."""
        tensor, peer, tag, is_sent = message
        tag = self._sealed(tag)
        try:
            if is_sent:
                return cast(dist.Work, dist.isend(tensor, group=self.group, tag=tag, group_dst=peer))
            return cast(dist.Work, dist.irecv(tensor, group=self.group, tag=tag, group_src=peer))
        except RuntimeError as error:
            self._fail((peer,), error)

    def _sealed(self, tag: int) -> int:
        return self.seal * TAGS + tag

    def start_all_to_all(self, received: Tensor, sent: Tensor, sizes_in: list[int], sizes_out: list[int]) -> Pending:
        """Start to send a part of `sent` to each rank, and to receive a part of `received` from each."""
        others = tuple(r for r in range(self.size) if r != self.rank)
        if sent.is_cpu:  # by messages with tags
            theirs, mine = received.split(sizes_in), sent.split(sizes_out)
            theirs[self.rank].copy_(mine[self.rank])
            return self.start([Message(t[r], r, 0, is_sent=t is mine) for t in (theirs, mine) for r in others])
        try:
            work = dist.all_to_all_single(received, sent, sizes_in, sizes_out, group=self.group, async_op=True)
        except RuntimeError as error:
            self._fail(others, error)
        return Pending([(cast(dist.Work, work), others)], [received, sent])

    def wait(self, pending: Pending) -> None:
        """Wait until transfers are done; on a GPU, let its stream wait.

        Raises:
            RankError: a rank is lost.
        """
        deadline = time.monotonic() + self.timeout
        for work, peers in pending.works:
            try:
                if pending.tensors[0].is_cpu:
                    work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
                else:
                    work.wait()
            except RuntimeError as error:
                self._fail(peers, error)

    def _fail(self, peers: Iterable[int], error: RuntimeError) -> NoReturn:
        """Raise the error that names the lost ranks.

        Args:
            peers: the ranks at the other end of what failed.
        """
        timed_out = "timed out" in str(error).lower()
        if not timed_out and not re.search(CLOSED, str(error), re.IGNORECASE):
            raise error  # the backend does not take the call, such as gloo tensors on a GPU
        self._write_alive()
        others = [rank for rank in range(self.size) if rank != self.rank]
        self._check_refused(others, error)
        alive = {rank: f"alive/{rank}" for rank in others}
        suspects, grace = (others, self.timeout) if timed_out else (list(peers), GRACE)
        missing = self.store.missing({rank: alive[rank] for rank in suspects}, grace)
        what = f"did not answer within {self.timeout:g} s" if timed_out else "ended, and the connection is closed"
        if missing:
            self._lose(missing, what, error)
        if not timed_out:
            self.store.missing(alive, self.timeout)  # all live, or one of them finds which is lost
        if not self.store.has("lost"):
            self._check_same(error)
            message = f"{self.function}: a message did not arrive, and every rank says that it is alive: {error}"
            self.known.lost = RankError(message)
            raise self.known.lost from error
        self._end("", error)

    def _write_alive(self) -> None:
        self.store.write(f"alive/{self.rank}", f"call {self.number + 1}: {self.text or self.function}")

    def _check_refused(self, others: Iterable[int], error: Exception) -> None:
        """Raise an error if other ranks raised one in this call, which this rank began."""
        keys = {rank: f"call/{self.number}/{rank}" for rank in others}
        texts = {rank: self.store.read(key) for rank, key in keys.items() if self.store.has(key)}
        if refused := {rank: text for rank, text in texts.items() if text.startswith(RAISES)}:
            self._end(self._difference(sorted({self.rank: self.text, **refused}.items())), error)

    def _check_same(self, error: Exception | None = None) -> None:
        """Raise an error if ranks, which are alive, are in different calls."""
        keys = {rank: f"alive/{rank}" for rank in range(self.size)}
        texts = {rank: self.store.read(key) for rank, key in keys.items() if self.store.has(key)}
        if len(set(texts.values())) > 1:
            self._end(self._difference(texts.items()), error)

    def _difference(self, texts: Iterable[tuple[int, str]]) -> str:
        listed = "".join(f"\n  rank {self._name(rank)}: {text}" for rank, text in texts)
        return f"{self.function}: the ranks of a group make the same call, and these differ.{listed}"

    def _lose(self, ranks: Sequence[int], what: str, error: Exception | None = None) -> NoReturn:
        """Raise the first verdict: which is that these ranks are lost, if there is none yet."""
        names = " and ".join(self._name(rank) for rank in ranks)
        of_all = f"{names} of {dist.get_world_size()}"
        who = f"rank {of_all} is lost: it" if len(ranks) == 1 else f"ranks {of_all} are lost: they"
        self._end(f"{self.function}: {who} {what}.", error, ranks)

    def _end(self, why: str, error: Exception | None, ranks: Sequence[int] = ()) -> NoReturn:
        """Raise the first verdict, which is this one if there is none yet; the group cannot be used any more.

        Args:
            ranks: that are lost; none if ranks differ.
        """
        ranks, why = cast("tuple[list[int], str]", json.loads(self.store.first("lost", json.dumps([list(ranks), why]))))
        end = " " if ranks else "\n"
        message = (
            f"{why}{end}This process (rank {dist.get_rank()}) cannot use the group any more: start all ranks again."
        )
        lost = tuple(dist.get_global_rank(self.group, rank) for rank in ranks)
        self.known.lost = RankError(message, lost) if lost else ProblemError(message)
        raise self.known.lost from error

    def _name(self, rank: int) -> str:
        return str(dist.get_global_rank(self.group, rank))
