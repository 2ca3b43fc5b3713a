"""An example for a new kind of store: weights in a dictionary, of which each unit comes after a random delay."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from carom.core.placement.store_kinds import register_store


class ToyStore:
    """Reads units ahead on threads of its own. The rules T1 to T9 are those of stores/store.py."""

    complete = False  # T3: a fetch may wait

    def __init__(self):
        self.values, self.random = {}, random.Random(0)  # values by name of the weight
        self.reads, self.threads = (
            {},
            ThreadPoolExecutor(2),
        )  # reads by unit: futures of the values of its weights
        self.sent = []  # events of copies, and the memory that they read

    def read_ahead(self, upcoming):
        for unit in islice(upcoming, 3):
            self._begin(unit)

    def _begin(self, unit):
        if unit not in self.reads:
            self.reads[unit] = self.threads.submit(self._read, unit, self.random.uniform(0, 0.002))
        return self.reads[unit]

    def _read(self, unit, seconds):
        time.sleep(seconds)
        return [self.values[home.entry.name].clone() for home in unit.homes]

    def ready(self, unit):
        return unit in self.reads and self.reads[unit].done()

    def fetch(self, unit, target, after, transfer):
        self._begin(unit)
        values = self.reads.pop(unit).result()
        event = transfer.copy_weights(unit, values, target, after)
        self.sent = [sent for sent in self.sent if not transfer.engine.landed(sent[0])]
        self.sent.append((event, values))  # T6
        return event

    def read(self, weight):
        return self.values[weight.entry.name]

    def write(self, weight, value):
        self.reads.pop(weight.unit, None)  # T7: it may have the old value
        self.values[weight.entry.name] = value.clone()

    def recover(self):
        self.reads.clear()  # T9

    def close(self):
        self.threads.shutdown()


register_store("toy", lambda wish: ToyStore())
