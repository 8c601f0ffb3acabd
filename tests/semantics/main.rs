//! What gRPC promises, over four columns: stock TCP, the drop-in (HTTP/2 over RDMA), native calls, and native
//! calls that stay in the process. Each
//! behaviour is written once, as a function of a [`Column`](column::Column) that returns its outcome in
//! words. The outcome over each column must be the one in [`table`], unless [`differences`] declares another
//! one with the reason. [`page`] writes the tables into the book.
#![forbid(unsafe_code)]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "tests"
)]

mod caller;
mod channel;
mod child;
mod column;
mod content;
mod core_tests;
mod differences;
mod page;
mod probe;
mod run;
mod table;
mod watch;

mod calls;
mod cancels;
mod connections;
mod deadlines;
mod endings;
mod ends_of_processes;
mod extensions;
mod layers;
mod limits;
mod metadata;
mod payloads;
mod streams;
