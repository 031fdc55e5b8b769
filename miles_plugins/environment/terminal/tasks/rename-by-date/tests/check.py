"""Tests of rename-by-date: names and contents of the folder."""

from checking import expect, finish, names, text

wanted = {
    "2023-02-28-1.txt": "second letter",
    "2023-11-05-1.txt": "a fruit",
    "2023-11-05-2.txt": "stripes",
    "2024-01-31-1.txt": "rest",
}
expect("names in notes", names("notes"), sorted(wanted))
for name, said in wanted.items():
    found = text(f"notes/{name}")
    expect(f"content of {name}", found, f"Date: {name[:10]}\n{said}\n")
finish()
