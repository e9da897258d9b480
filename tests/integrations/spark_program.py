"""Calls functions in ranks on a Spark of this machine; saves what they returned: python spark_program.py RESULTS."""

from __future__ import annotations

import os
import signal
import sys

import torch
from pyspark.sql import SparkSession

import hvdlite.horovod

hvdlite.horovod.install()

import horovod.spark  # noqa: E402  # only now it is found


def train(scale: float, fails: str = "") -> list[float]:
    import horovod.torch as hvd  # noqa: PLC0415  # in the rank's process

    hvd.init()
    if fails and hvd.rank() == 1:
        if fails == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ZeroDivisionError("of rank 1")
    total = hvd.allreduce(torch.tensor(scale * (1 + hvd.rank())), op=hvd.Sum)
    return [hvd.rank(), hvd.size(), hvd.local_rank(), total.item()]


def error_of(**arguments: object) -> str:
    try:
        horovod.spark.run(train, (1.0,), **arguments)
    except Exception as error:  # noqa: BLE001  # its words are the result
        return f"{type(error).__name__}: {error}"
    return "none"


if __name__ == "__main__":
    from sparkdl import HorovodRunner

    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    results = {
        "ranks": horovod.spark.run(train, (2.0,), num_proc=2),
        "raised": error_of(kwargs={"fails": "raises"}),
        "died": error_of(kwargs={"fails": "dies"}),
        "too many": error_of(num_proc=5, start_timeout=2),
        "later": horovod.spark.run(train, (1.0,)),
        "runner": HorovodRunner(np=2).run(train, scale=3.0),
        "here": HorovodRunner(np=-2).run(train, scale=3.0),
    }
    spark.stop()
    torch.save(results, sys.argv[1])
