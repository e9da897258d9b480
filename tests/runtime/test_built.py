"""The questions about the build, such as nccl_built(), are answered for the installed torch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import hvdlite as hvd
from hvdlite.runtime import world


def test_the_answers_are_torchs():
    assert hvd.gloo_built() is hvd.gloo_enabled() is dist.is_gloo_available()
    assert hvd.mpi_built() is dist.is_mpi_available()
    assert hvd.cuda_built() is (torch.version.cuda is not None)
    assert hvd.rocm_built() is (torch.version.hip is not None)
    assert not hvd.mpi_enabled()
    assert not hvd.ddl_built()
    assert not hvd.ccl_built()


@pytest.mark.parametrize(("version", "number"), [((2, 28, 9), 22809), ((2, 27, 5, "suffix"), 22705)])
def test_the_version_of_nccl_is_a_number_as_nccl_has_it(version, number, monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    assert hvd.nccl_built() == number
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert hvd.nccl_built() == 0


def test_whether_mpi_takes_threads_is_answered_after_init_as_in_horovod():
    with pytest.raises(ValueError, match="Horovod has not been initialized"):
        hvd.mpi_threads_supported()
    hvd.init()
    try:
        assert not hvd.mpi_threads_supported()
        assert hvd.is_homogeneous()
    finally:
        hvd.shutdown()
    with pytest.raises(hvd.NotInitializedError):
        world.is_homogeneous()
