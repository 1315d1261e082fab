"""Is this path on a network filesystem? SQLite's WAL needs a local one."""

from pathlib import Path

MOUNTS = Path("/proc/mounts")

NETWORK = {
    "9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "ncpfs",
    "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "smb3", "smbfs", "virtiofs", "wekafs",
}  # fmt: skip
LOCAL_FUSE = {"fuse.ext4", "fuse.lxcfs", "fuse.ntfs-3g", "fuseblk"}


def on_network(path: Path, mounts: Path = MOUNTS) -> bool:
    """Say whether the path lies, or would lie, on a network filesystem.

    Known on Linux, from its table of mounts, and on Windows for ``//server/share``;
    elsewhere pass ``network=True`` to the writer.
    """
    if path.drive.startswith(("\\\\", "//")):
        return True
    if not mounts.exists():
        return False
    kind = _kind(path.resolve(), mounts.read_text())
    return kind in NETWORK or (kind.startswith("fuse") and kind not in LOCAL_FUSE)


def _kind(path: Path, table: str) -> str:
    """Return the type of the filesystem with the longest mount point above the path."""
    above = {path, *path.parents}
    rows = (line.split() for line in table.splitlines())
    found = [
        (len(point), n, kind)
        for n, (_, point, kind, *_) in enumerate(rows)
        if Path(_plain(point)) in above
    ]
    return max(found)[2] if found else ""


def _plain(point: str) -> str:
    r"""Return a mount point as a path: the table writes a space as ``\040``."""
    return point.replace(r"\040", " ").replace(r"\011", "\t")
