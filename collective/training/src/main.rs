//! An example that trains.
#![forbid(unsafe_code)]
mod data;
mod failure;
mod model;
fn main() {}
