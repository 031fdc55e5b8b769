"""Tests of backup-script: archives of folders made here."""

import os
import tarfile

from checking import expect, finish, run, write

write("box/one.txt", "1")
write("box/deep/er/two words.txt", "2")
write("box/skip.md", "no")
done = run("sh", "backup.sh", "box")
expect("output", done.stdout.strip(), "2")
expect("exit code", done.returncode, 0)
if os.path.exists("box.tar.gz"):
    with tarfile.open("box.tar.gz") as archive:
        held = sorted(m.name.removeprefix("./") for m in archive.getmembers() if m.isfile())
else:
    held = []
expect("files in box.tar.gz", held, ["box/deep/er/two words.txt", "box/one.txt"])
done = run("sh", "backup.sh", "nowhere")
expect("output without a folder", done.stdout, "")
expect("exit code without a folder", done.returncode, 2)
finish()
