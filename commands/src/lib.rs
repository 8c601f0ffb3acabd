//! What the commands of this repository, their benches and their tests share: how values of options are
//! parsed and figures are written for people, the failures with their exit status, log messages, files, child
//! processes, cores, statistics, tables, plots, and payloads that receivers can check.
//!
//! It is a part of the commands, and no library for other programs: its API may change in any version. It is
//! published because the commands are.
#![forbid(unsafe_code)]

pub mod cores;
#[cfg(feature = "remote")]
pub mod ends;
mod failure;
mod lists;
mod named;
pub mod output;
pub mod payload;
#[cfg(feature = "plot")]
pub mod plot;
pub mod process;
#[cfg(feature = "remote")]
pub mod remote;
#[cfg(feature = "runtime")]
mod runtime;
#[cfg(feature = "remote")]
mod signals;
mod start;
pub mod statistics;
pub mod table;
pub mod units;

pub use failure::{Context, Failure, ValueError, chain, one_line};
pub use lists::{List, name_list, number_list, parse_list, parse_set};
pub use named::{Named, parse_name};
#[cfg(feature = "runtime")]
pub use runtime::Flavour;
#[cfg(feature = "remote")]
pub use signals::Signals;
pub use start::{bench_options, color_option, log, main, parse, status};
pub use {clap, serde_json};
