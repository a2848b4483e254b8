# SPDX-License-Identifier: MIT-0
"""The temporary folder in which check_copy.py lets a copy work. This file knows nothing of torch.

A user's folder is mirrored by real folders, copies of small files, and links to the others. Then
whatever changes a copied file, or removes what is in a folder, changes the mirror alone. Guard
refuses what Python would write through a link, or outside the temporary folder.
"""
import collections
import errno
import os
import shutil
import sys

SMALL, IN_ALL = 2**20, 16 * 2**20  # bytes: larger files are linked, and all that exceed the sum
MANY, MOST = 1000, 20000  # entries of a folder, above which its files are linked; of all folders


class Mirror:
    """Mirrors folders of the user beneath root, at the same absolute paths."""

    def __init__(self, root, most=MOST):
        self.root = root
        self.room, self.entries = IN_ALL, most
        self.copied = 0  # files
        self.linked = {}  # what is linked: the state of files, to see that they change
        self.real = set()  # folders that are mirrored, by their real paths

    def add(self, place, levels=50):
        """Mirror a folder, and so many levels of folders in it: the upper ones first."""
        queue = collections.deque([(place, self.root + place, levels)])
        while queue:
            folder, mirror, levels = queue.popleft()
            self.real.add(os.path.realpath(folder))
            os.makedirs(mirror, exist_ok=True)
            try:
                entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
            except OSError:  # it may not be read
                continue
            self.entries -= len(entries)
            for entry in entries:
                new = f"{mirror}/{entry.name}"
                if entry.name == "__pycache__":
                    continue
                if levels and self.takes(entry):
                    queue.append((entry.path, new, levels - 1))
                elif not os.path.lexists(new) and not self.copy(entry, new, len(entries)):
                    os.symlink(os.path.realpath(entry.path), new)
                    self.linked[entry.path] = state(entry.path) if entry.is_file() else None

    def takes(self, entry):
        """Return whether a folder is mirrored: not an environment or repository, nor a loop."""
        return (entry.is_dir() and self.entries > 0 and not entry.name == ".git"
                and not os.path.exists(f"{entry.path}/pyvenv.cfg")
                and os.path.realpath(entry.path) not in {*self.real, os.path.dirname(self.root)})

    def copy(self, entry, new, count):
        """Copy a small file to new. Return whether it is copied."""
        try:
            size = entry.stat().st_size
            if not entry.is_file() or size > min(SMALL, self.room) or count > MANY:
                return False
            shutil.copy2(entry.path, new)
        except OSError:  # it may not be read, or is gone
            return False
        self.room -= size
        self.copied += 1
        return True

    def changed(self):
        """Return the files that are linked, and have changed."""
        return [path for path, before in self.linked.items() if before and state(path) != before]


def state(path):
    """Return what shows that a file has changed."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def clone(root, new):
    """Make another mirror like the one at root. Large files in it are linked."""
    def copy_or_link(path, copy):
        if os.path.getsize(path) > SMALL:
            os.symlink(path, copy)
        else:
            shutil.copy2(path, copy)

    shutil.copytree(root, new, symlinks=True, copy_function=copy_or_link)


REFUSED = "the check refuses to change what is not in its temporary folder"
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Python's audit events that change a folder, or a file: which of their arguments are paths
OF_FOLDERS = {"os.remove": (0,), "os.rmdir": (0,), "os.mkdir": (0,), "os.rename": (0, 1),
              "os.link": (0, 1), "os.symlink": (1,), "shutil.rmtree": (0,)}
OF_FILES = {"os.truncate": (0,), "os.utime": (0,), "os.chmod": (0,), "os.chown": (0,)}


class Guard:
    """Refuses, in this process, what Python would change outside a folder (and /dev, /proc)."""

    def __init__(self, folder):
        self.free = [folder, "/dev", "/proc"]
        sys.addaudithook(self.see)

    def see(self, event, arguments):
        if event == "open" and (arguments[2] or 0) & WRITES:
            self.check(arguments[0], replaces=arguments[2] & os.O_TRUNC)
        for number in OF_FOLDERS.get(event, ()):
            if event != "os.mkdir" or not os.path.lexists(arguments[0]):  # makedirs() tries it
                self.check(arguments[number], follow=False)
        for number in OF_FILES.get(event, ()):
            self.check(arguments[number])

    def check(self, path, follow=True, replaces=False):
        """Raise PermissionError unless path may be changed. follow: the file that it links to.

        replaces: if path is a link, a new file takes its place.
        """
        if not isinstance(path, (str, bytes, os.PathLike)):
            return  # the number of an open file
        path = os.path.join(os.getcwd(), os.fsdecode(path)).rstrip("/")
        own = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        target = os.path.realpath(own) if follow else own
        if self.is_free(own) and self.is_free(target):
            return
        if not (self.is_free(own) and replaces and os.path.isfile(target)):
            raise PermissionError(errno.EACCES, REFUSED, target)
        try:
            os.unlink(own)  # the link
        except FileNotFoundError:  # another rank has done it
            pass

    def is_free(self, path):
        return any(f"{path}/".startswith(f"{place}/") for place in self.free)
