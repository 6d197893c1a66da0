"""Codecs: the packed formats of compressed residuals."""

from dafjax.codecs._abstract import AbstractCodec as AbstractCodec
from dafjax.codecs._affine import Affine as Affine, PackedAffine as PackedAffine
from dafjax.codecs._bitmask import Bitmask as Bitmask
