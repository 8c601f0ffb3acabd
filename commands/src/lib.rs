//! What the commands of this repository share: how values of options are parsed and figures are written for people, the failures
//! with their exit status, log messages, files and tables.
//!
//! It is a part of the commands, not of the library: nothing here is published.
#![forbid(unsafe_code)]

mod failure;
mod lists;
pub mod output;
mod start;
pub mod table;
pub mod units;
mod value_error;

pub use failure::{Failure, chain, one_line};
pub use lists::{List, parse_list, parse_set};
pub use start::{explain, log, status};
pub use value_error::ValueError;
