//! Tests about the source of the repository: its layers, its public API, its documentation and its pages.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod api;
mod documentation;
mod errors;
mod layering;
mod model;
mod pages;
