"""The papers that the measures are from, in BibTeX."""

from __future__ import annotations

import re

from saltflat.errors import InvalidValue, nearest
from saltflat.version import __version__

ENTRIES: dict[str, str] = {
    "saltflat": f"""@software{{saltflat,
  title = {{saltflat: scale-invariant sharpness for {{PyTorch}}}},
  author = {{{{The saltflat authors}}}},
  version = {{{__version__}}},
}}""",
    "ibayashi2021minimum": """@misc{ibayashi2021minimum,
  title = {Minimum sharpness: Scale-invariant parameter-robustness of neural networks},
  author = {Ibayashi, Hikaru and Hamaguchi, Takuo and Imaizumi, Masaaki},
  year = {2021},
  eprint = {2106.12612},
  archivePrefix = {arXiv},
}""",
    "tsuzuku2020normalized": """@inproceedings{tsuzuku2020normalized,
  title = {Normalized Flat Minima: Exploring Scale Invariant Definition of Flat Minima for Neural
           Networks Using {PAC}-{B}ayesian Analysis},
  author = {Tsuzuku, Yusuke and Sato, Issei and Sugiyama, Masashi},
  booktitle = {Proceedings of the 37th International Conference on Machine Learning},
  series = {Proceedings of Machine Learning Research},
  volume = {119},
  year = {2020},
}""",
    "petzka2019reparameterization": """@misc{petzka2019reparameterization,
  title = {A Reparameterization-Invariant Flatness Measure for Deep Neural Networks},
  author = {Petzka, Henning and Adilova, Linara and Kamp, Michael and Sminchisescu, Cristian},
  year = {2019},
  eprint = {1912.00058},
  archivePrefix = {arXiv},
}""",
    "petzka2021relative": """@inproceedings{petzka2021relative,
  title = {Relative Flatness and Generalization},
  author = {Petzka, Henning and Kamp, Michael and Adilova, Linara and Sminchisescu, Cristian and
            Boley, Mario},
  booktitle = {Advances in Neural Information Processing Systems},
  volume = {34},
  pages = {18420--18432},
  year = {2021},
}""",
    "adilova2023fam": """@misc{adilova2023fam,
  title = {{FAM}: Relative Flatness Aware Minimization},
  author = {Adilova, Linara and Abourayya, Amr and Li, Jianning and Dada, Amin and Petzka, Henning
            and Egger, Jan and Kleesiek, Jens and Kamp, Michael},
  year = {2023},
  eprint = {2307.02337},
  archivePrefix = {arXiv},
}""",
    "yi2019bn": """@inproceedings{yi2019bn,
  title = {{BN}-invariant Sharpness Regularizes the Training Model to Better Generalization},
  author = {Yi, Mingyang and Zhang, Huishuai and Chen, Wei and Ma, Zhi-Ming and Liu, Tie-Yan},
  booktitle = {Proceedings of the 28th International Joint Conference on Artificial Intelligence},
  pages = {4164--4170},
  year = {2019},
}""",
    "keskar2017large": """@inproceedings{keskar2017large,
  title = {On Large-Batch Training for Deep Learning: Generalization Gap and Sharp Minima},
  author = {Keskar, Nitish Shirish and Mudigere, Dheevatsa and Nocedal, Jorge and Smelyanskiy,
            Mikhail and Tang, Ping Tak Peter},
  booktitle = {International Conference on Learning Representations},
  year = {2017},
  eprint = {1609.04836},
  archivePrefix = {arXiv},
}""",
    "yao2018hessian": """@inproceedings{yao2018hessian,
  title = {Hessian-based Analysis of Large Batch Training and Robustness to Adversaries},
  author = {Yao, Zhewei and Gholami, Amir and Lei, Qi and Keutzer, Kurt and Mahoney, Michael W.},
  booktitle = {Advances in Neural Information Processing Systems},
  volume = {31},
  year = {2018},
}""",
    "foret2021sharpness": """@inproceedings{foret2021sharpness,
  title = {Sharpness-Aware Minimization for Efficiently Improving Generalization},
  author = {Foret, Pierre and Kleiner, Ariel and Mobahi, Hossein and Neyshabur, Behnam},
  booktitle = {International Conference on Learning Representations},
  year = {2021},
  eprint = {2010.01412},
  archivePrefix = {arXiv},
}""",
    "kwon2021asam": """@inproceedings{kwon2021asam,
  title = {{ASAM}: Adaptive Sharpness-Aware Minimization for Scale-Invariant Learning of Deep Neural
           Networks},
  author = {Kwon, Jungmin and Kim, Jeongseop and Park, Hyunseo and Choi, In Kwon},
  booktitle = {Proceedings of the 38th International Conference on Machine Learning},
  series = {Proceedings of Machine Learning Research},
  volume = {139},
  pages = {5905--5914},
  year = {2021},
}""",
    "liang2019fisher": """@inproceedings{liang2019fisher,
  title = {{Fisher}-{Rao} Metric, Geometry, and Complexity of Neural Networks},
  author = {Liang, Tengyuan and Poggio, Tomaso and Rakhlin, Alexander and Stokes, James},
  booktitle = {Proceedings of the 22nd International Conference on Artificial Intelligence and
               Statistics},
  series = {Proceedings of Machine Learning Research},
  volume = {89},
  pages = {888--896},
  year = {2019},
}""",
    "jiang2020fantastic": """@inproceedings{jiang2020fantastic,
  title = {Fantastic Generalization Measures and Where to Find Them},
  author = {Jiang, Yiding and Neyshabur, Behnam and Mobahi, Hossein and Krishnan, Dilip and Bengio,
            Samy},
  booktitle = {International Conference on Learning Representations},
  year = {2020},
  eprint = {1912.02178},
  archivePrefix = {arXiv},
}""",
}


def bibtex(*keys: str) -> str:
    """The entries of some papers, one after the other."""
    for key in keys:
        if key not in ENTRIES:
            raise InvalidValue(f"There is no paper {key!r}. {nearest(key, ENTRIES)}")
    if not keys:
        raise InvalidValue("It has no references: it is a user's own, or from an older file.")
    return "\n\n".join(ENTRIES[key] for key in keys)


def title(key: str) -> str:
    """Of a paper, on one line and without braces."""
    found = re.search(r"title = \{(.*?)\},\n", ENTRIES[key], re.DOTALL)
    assert found is not None
    return " ".join(found[1].translate({ord("{"): None, ord("}"): None}).split())
