"""Functions by which ops leave samples out, and the ledger counts them."""


def nothing(sample) -> bool:
    return False


def fail_on_fives(sample):
    if int(sample["cls"]) % 5 == 0:
        raise ValueError("a five")
    return sample
