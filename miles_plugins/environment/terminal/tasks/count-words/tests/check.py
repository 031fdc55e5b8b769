"""Tests of count-words: the file holds the five commonest words."""

import re
from collections import Counter

from checking import expect, finish, text

words = Counter(re.findall("[a-z]+", text("poem.txt").lower()))
ranked = sorted(words.items(), key=lambda item: (-item[1], item[0]))[:5]
wanted = [f"{word} {count}" for word, count in ranked]
expect("poem.txt is as it was", words["rain"], 4)
expect("counts.txt", text("counts.txt").split("\n")[:-1], wanted)
finish()
