"""Stores: where packed residuals are kept until the backward pass reads them."""

from dafjax._native import PoolExhausted as PoolExhausted, StaleHandle as StaleHandle
from dafjax.stores._abstract import AbstractStore as AbstractStore
from dafjax.stores._arrays import Arrays as Arrays, Host as Host
from dafjax.stores._page_pool import PagePool as PagePool
from dafjax.stores._pool_stats import (
    AdaptiveGrowth as AdaptiveGrowth,
    FixedGrowth as FixedGrowth,
    PoolStats as PoolStats,
    SiteStats as SiteStats,
)
