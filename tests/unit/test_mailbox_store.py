"""The store through which torch's process groups form, after torch alone holds it."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from refitd.copy_services import Epoch, Mailbox, nccl
from refitd.copy_services.peers import MailboxStore
from refitd.copy_services.waits import Deadline


class Letters(Mailbox):
    """A mailbox of one worker."""

    def __init__(self) -> None:
        self.put_keys: list[str] = []

    def put(self, key: str, value: bytes) -> None:
        self.put_keys.append(key)

    def get(self, key: str, timeout: float) -> bytes:
        raise AssertionError(f"{key} is the worker's own")


def epoch_of(mailbox: Mailbox) -> Epoch:
    return Epoch("e", 0, ("worker 0",), "127.0.0.1", 1 << 20, mailbox, 5.0, bytes(32), "cuda:0")


def use(held: dist.Store) -> None:
    """Call what threads of a formed group call, through the part in C++."""
    held.set("a", "1")
    assert held.check(["a"]) and not held.check(["b"])
    assert held.get("a") == b"1" and held.multi_get(["a"]) == [b"1"]
    copy = held.clone()
    gc.collect()
    assert copy.check(["a"]) and copy.num_keys() == held.num_keys() >= 1
    assert held.delete_key("a") is False
    held.wait(["a"])


def test_torch_finds_every_method_and_a_clone_needs_no_other_owner() -> None:
    store = MailboxStore(epoch_of(Letters()), Deadline.after(5))
    held = dist.PrefixStore("p", store)
    use(held)
    with pytest.raises(Exception, match="epoch e: the rendezvous compares no values"):
        held.compare_set("c", "", "1")
    with pytest.raises(Exception, match="epoch e: the rendezvous has no counters"):
        held.add("n", 1)


def test_a_formed_groups_threads_leave_the_mailbox_to_its_owner() -> None:
    mailbox = Letters()
    store = MailboxStore(epoch_of(mailbox), Deadline.after(5))
    store.set("before", b"")
    store.formed()
    store.set("after", b"1")
    assert mailbox.put_keys == ["before"] and store.get("after") == b"1"
    with pytest.raises(Exception, match="its group has formed, and no worker puts 'other' now"):
        store.get("other")


def test_the_service_keeps_the_store_that_nccls_threads_call(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        """Holds its store as ProcessGroupNCCL does: by its part in C++ only."""

        Options = SimpleNamespace

        def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
            self.store = dist.PrefixStore("nccl", store)

    class Backed:
        def __init__(self, group: Any, **_: Any) -> None:
            self.group = group

    monkeypatch.setattr(c10d, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(nccl, "Peers", lambda group, labels: SimpleNamespace())
    monkeypatch.setattr(nccl, "prove", lambda peers, epoch, deadline: None)
    monkeypatch.setattr(nccl, "NcclService", Backed)
    service = nccl.join(epoch_of(Letters()))
    gc.collect()
    use(service.group.store)
