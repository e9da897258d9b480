"""The number of slots that `auto` stands for, and of cores that may be used."""

import pytest
from hvdlite_launcher.system.machine import cpu_quota, slots_by_hardware, usable_cores


@pytest.fixture
def four_gpus(tmp_path):
    for bus in range(4):
        (tmp_path / "gpus" / f"0000:0{bus}:00.0").mkdir(parents=True)
    return str(tmp_path / "gpus")


def test_there_is_a_slot_for_each_gpu(four_gpus):
    assert slots_by_hardware({}, four_gpus) == 4


@pytest.mark.parametrize(
    ("devices", "seen"), [("0", 1), ("2,3", 2), ("0, GPU-1f,-1,2", 2), ("0,1,2,3,4,5", 4), ("0,,1", 1), ("0,1,7,2", 2)]
)
def test_a_gpu_that_workers_do_not_see_has_no_slot(four_gpus, devices, seen):
    assert slots_by_hardware({"CUDA_VISIBLE_DEVICES": devices}, four_gpus) == seen


def test_where_the_driver_lists_none_nvidia_smi_is_asked(tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA A (UUID: GPU-1)'; echo '  MIG 1g'; echo 'GPU 1: NVIDIA A'\n")
    smi.chmod(0o755)
    assert slots_by_hardware({"PATH": f"{tmp_path}:/bin:/usr/bin"}, str(tmp_path / "none")) == 2


@pytest.mark.parametrize("devices", ["", "-1"])
def test_without_a_gpu_there_is_a_slot_for_each_usable_core(four_gpus, devices, tmp_path):
    assert slots_by_hardware({"CUDA_VISIBLE_DEVICES": devices}, four_gpus) == usable_cores()
    assert slots_by_hardware({"PATH": str(tmp_path)}, str(tmp_path / "none")) == usable_cores()


@pytest.mark.parametrize(
    ("group", "files", "quota"),
    [
        (
            "0::/job/step",
            {"cpu.max": "max 100000", "job/cpu.max": "250000 100000", "job/step/cpu.max": "max 100000"},
            2.5,
        ),
        ("0::/job/step", {"job/cpu.max": "400000 100000", "job/step/cpu.max": "150000 100000"}, 1.5),
        ("0::/not/to/be/seen", {"cpu.max": "300000 100000"}, 3.0),
        ("0::/", {"cpu.max": "max 100000"}, None),
        (
            "5:memory:/x\n4:cpu,cpuacct:/pod",
            {"cpu,cpuacct/pod/cpu.cfs_quota_us": "200000", "cpu,cpuacct/pod/cpu.cfs_period_us": "100000"},
            2.0,
        ),
        ("4:cpu:/pod", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("", {}, None),
    ],
)
def test_a_quota_of_a_group_or_one_above_it_limits_the_cores(tmp_path, monkeypatch, group, files, quota):
    (tmp_path / "cgroup").write_text(group)
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(f"{text}\n")
    assert cpu_quota(str(tmp_path / "cgroup"), str(tmp_path / "fs")) == quota
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr("hvdlite_launcher.system.machine.cpu_quota", lambda: quota)
    assert usable_cores() == (8 if quota is None else int(quota))
