class Module:
    def parameters(self):
        return []

    def to(self, device):
        return self

    def __call__(self, x):
        return x * 2


class Linear(Module):
    def __init__(self, a, b):
        pass


class Sequential(Module):
    def __init__(self, *layers):
        pass
