"""`Lan`: test machines that hvdlite-run reaches over ssh. Each has a real sshd, its own address, and new keys.

One more machine, the desk, has no sshd: tests start hvdlite-run there as a user who is not on any of the hosts.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from e2e.machines import Machine, Switch, kill_all, program

_SSHD_CONFIG = """
ListenAddress {address}
Port {port}
HostKey {host_key}
AuthorizedKeysFile {authorized_keys}
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PidFile none
UseDNS no
SetEnv TMPDIR={tmp}
"""


class Host(Machine):
    """A machine with an sshd, on which the user's key logs in as root."""

    def __init__(self, name: str, state: Path, etc_hosts: str, *, address: str, port: int, user_key: Path) -> None:
        super().__init__(name, state, etc_hosts)
        self.address = address
        self.port = port
        self._directory = state / name
        self._user_key = user_key
        self.accept_keys()
        self.make_host_key()

    @property
    def spec(self) -> str:
        """The host for hvdlite-run's -H, by its address and without the slots."""
        return f"[{self.address}]" if ":" in self.address else self.address

    def start_sshd(self) -> None:
        config = self._directory / "sshd_config"
        config.write_text(
            _SSHD_CONFIG.format(
                address=self.address,
                port=self.port,
                host_key=self._host_key,
                authorized_keys=self._authorized_keys,
                tmp=self.tmp,
            )
        )
        self.run("mkdir", "-p", "/run/sshd")
        self._sshd = self.serve(str(program("sshd")), "-D", "-e", "-f", str(config))
        give_up_at = time.monotonic() + 60
        while self._sshd.pid not in self.listening_tcp().values():
            assert self._sshd.is_running(), f"sshd on {self.name} ended"
            assert time.monotonic() < give_up_at, f"sshd on {self.name} does not listen"

    def make_host_key(self) -> None:
        """Makes a new host key; call it before `start_sshd`."""
        make_key(self._host_key)

    def stop_sshd(self) -> None:
        self._sshd.kill()
        self._sshd.wait()

    def vanish(self) -> None:
        """Ends sshd and all else that runs here, as where a pod is deleted; `change_host_key` starts it anew."""
        self.stop_sshd()
        kill_all(self.processes())

    def change_host_key(self) -> None:
        """Starts sshd with another key."""
        if self._sshd.is_running():
            self.stop_sshd()
        self._host_key.unlink()
        self.make_host_key()
        self.start_sshd()

    def accept_keys(self) -> None:
        shutil.copy(self._user_key.with_suffix(".pub"), self._authorized_keys)

    def refuse_keys(self) -> None:
        self._authorized_keys.write_text("")

    def stop_answering(self) -> None:
        """Stops sshd: the kernel still accepts connections, but nothing answers on them."""
        self._sshd.send_signal(signal.SIGSTOP)

    @property
    def _host_key(self) -> Path:
        return self._directory / "host_key"

    @property
    def _authorized_keys(self) -> Path:
        return self._directory / "authorized_keys"


class Lan:
    """Hosts and the desk, on one switch.

    ``hosts`` has the hosts in the order of the constructor's ``names``; ``machines`` has the desk too.
    """

    def __init__(
        self,
        *names: str,
        interfaces: Sequence[str] = (),
        ipv6: bool = False,
        ports: Sequence[int] = (),
        decoy: bool = False,
    ) -> None:
        """Starts the machines.

        ``interfaces`` and ``ports`` have the interface's name and sshd's port of each host; the default is eth0 and 22.
        ``decoy``: every host also has an interface ``docker0``, all with the same address.
        """
        # A short path, because a Unix socket's path has at most 107 bytes.
        self._state = Path(tempfile.mkdtemp(prefix="lan-"))
        self.machines: list[Machine] = []
        self._switch: Switch | None = None
        try:
            self._make(names, interfaces or ["eth0"] * len(names), ports or [22] * len(names), ipv6, decoy)
        except BaseException:
            self.close()
            raise

    def _make(
        self, names: Sequence[str], interfaces: Sequence[str], ports: Sequence[int], ipv6: bool, decoy: bool
    ) -> None:
        self._switch = Switch(self._state)
        user_key = self._state / "user_key"
        make_key(user_key)
        pattern, length = ("fd77::{}", 64) if ipv6 else ("10.77.0.{}", 24)
        addresses = {name: pattern.format(number) for number, name in enumerate(["desk", *names], start=1)}

        def known_to(name: str) -> str:
            return "".join(f"{address} {other}\n" for other, address in addresses.items() if other != name)

        self.desk = Machine("desk", self._state, known_to("desk"))
        self.machines.append(self.desk)
        self.hosts: list[Host] = []
        for name, port in zip(names, ports, strict=True):
            host = Host(name, self._state, known_to(name), address=addresses[name], port=port, user_key=user_key)
            self.machines.append(host)
            self.hosts.append(host)
        for machine, interface in zip(self.machines, ["eth0", *interfaces], strict=True):
            self._switch.plug(machine, interface, [f"{addresses[machine.name]}/{length}"])
            shutil.copy(user_key, machine.home / ".ssh" / "id_ed25519")
        for host in self.hosts:
            if decoy:
                host.run("ip", "link", "add", "docker0", "type", "bridge")
                host.run("ip", "address", "add", "172.17.0.1/16", "dev", "docker0")
                host.run("ip", "link", "set", "docker0", "up")
            host.start_sshd()

    def cut(self, machine: Machine) -> None:
        """Drops all packets from and to the machine; its interface stays up, so nothing is notified."""
        assert self._switch is not None
        self._switch.cut(machine)

    def cut_between(self, *machines: Machine) -> None:
        """Drops all packets between these machines; hvdlite-run on the desk still reaches each."""
        assert self._switch is not None
        self._switch.cut_between(*machines)

    def restore(self, machine: Machine) -> None:
        assert self._switch is not None
        self._switch.restore(machine)
        # Otherwise the others may still fail for a moment, because their last ARP request for its address was lost.
        for other in self.machines:
            other.run("ip", "neighbour", "flush", "all")

    def shape(self, rate: str) -> None:
        """Limits the traffic to each machine to ``rate``, such as ``100mbit``."""
        assert self._switch is not None
        for machine in self.machines:
            self._switch.shape(machine, rate)

    def left(self) -> list[str]:
        """Returns the processes and files of jobs that are on any of the machines."""
        return [
            f"{machine.name}: {thing}"
            for machine in self.machines
            for thing in (*machine.processes(), *machine.leftovers())
        ]

    def kill_jobs(self) -> None:
        for machine in self.machines:
            kill_all(machine.processes())

    def close(self) -> None:
        for machine in self.machines:
            machine.close()
        if self._switch is not None:
            self._switch.close()
        shutil.rmtree(self._state, ignore_errors=True)


def make_key(path: Path) -> None:
    subprocess.run([str(program("ssh-keygen")), "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
