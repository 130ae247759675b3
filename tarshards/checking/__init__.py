"""Shards -> what is wrong with them, and what they hold."""

from tarshards.checking.check import check_shards, repair_shards
from tarshards.checking.report import SHOWN, FieldSizes, Finding, Report

__all__ = ["SHOWN", "FieldSizes", "Finding", "Report", "check_shards", "repair_shards"]
