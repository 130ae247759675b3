"""The programs that tests use, their Debian packages, and the handling of missing ones.

A test calls :func:`need`, which skips it where a program is missing; ``make programs`` runs this file, which installs
the missing ones by apt, as root or with sudo.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

BASH_COMPLETION = "bash-completion"
COMPILER = "a C compiler"
TUN = "root with /dev/net/tun"  # which no package gives
WEBDAV = "nginx with WebDAV"
WEBDAV_MODULE = Path("/usr/lib/nginx/modules/ngx_http_dav_ext_module.so")
PACKAGES = {
    "7zz": ["7zip"],
    COMPILER: ["gcc", "libc6-dev", "python3-dev"],
    BASH_COMPLETION: ["bash-completion"],
    "bsdtar": ["libarchive-tools"],
    "bzip2": ["bzip2"],
    "chromium": ["chromium"],
    "curl": ["curl"],
    "espeak-ng": ["espeak-ng"],
    "ffmpeg": ["ffmpeg"],
    "fish": ["fish"],
    "git": ["git"],
    "gm": ["graphicsmagick"],
    "GNU tar": ["tar"],
    "gzip": ["gzip"],
    "java": ["default-jre-headless"],
    "jq": ["jq"],
    "kubectl": ["kubernetes-client"],
    "lz4": ["lz4"],
    "lzma": ["xz-utils"],
    "man": ["man-db"],
    "mariadbd": ["mariadb-server"],
    "munged": ["munge"],
    "nginx": ["nginx-light"],
    "node": ["nodejs"],
    "openssl": ["openssl"],
    "pixz": ["pixz"],
    "slurmctld": ["slurm-wlm"],
    "slurmdbd": ["slurmdbd"],
    "strace": ["strace"],
    "unshare": ["util-linux"],
    WEBDAV: ["nginx-light", "libnginx-mod-http-dav-ext"],
    "xz": ["xz-utils"],
    "zsh": ["zsh"],
    "zstd": ["zstd"],
}


def find(program: str) -> str | None:
    """Return the path of *program*, also where only root's PATH leads."""
    return shutil.which(program, path=f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin")


@cache
def is_installed(name: str) -> bool:
    """Tell whether the key *name* of PACKAGES is here, or TUN."""
    if name == BASH_COMPLETION:
        return Path("/usr/share/bash-completion/bash_completion").exists()
    if name == COMPILER:
        return find("cc") is not None and Path(sysconfig.get_path("include"), "Python.h").exists()
    if name == TUN:
        may = os.geteuid() == 0 and os.access("/dev/net/tun", os.R_OK | os.W_OK) and find("unshare") is not None
        return may and subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0
    if name == WEBDAV:
        return find("nginx") is not None and WEBDAV_MODULE.exists()
    if name == "GNU tar":
        tar = find("tar")
        return tar is not None and b"GNU tar" in subprocess.run([tar, "--version"], capture_output=True).stdout
    return find(name) is not None


def need(*names: str) -> None:
    """Skip the test unless all *names*, keys of PACKAGES or TUN, are here."""
    import pytest

    if missing := [name for name in names if not is_installed(name)]:
        pytest.skip(f"needs {', '.join(missing)}")


def load_kernel(module: str) -> ModuleType:
    """Import *module*, a kernel or its twin; skip the test where there is no compiler to make the kernel."""
    try:
        return import_module(module)
    except ImportError:
        need(COMPILER)
        raise


def warnings_of(stderr: str) -> str:
    """Return a program's stderr without the notice about missing kernels."""
    return "".join(line for line in stderr.splitlines(True) if "native kernels are not compiled" not in line)


def main() -> None:
    packages = [package for name, packages in PACKAGES.items() if not is_installed(name) for package in packages]
    if packages:
        as_root = [] if os.geteuid() == 0 else ["sudo"]
        subprocess.run([*as_root, "apt-get", "update", "-qq"], check=True)
        command = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "-y", "-qq", *packages]
        subprocess.run([*as_root, *command], check=True)


if __name__ == "__main__":
    main()
