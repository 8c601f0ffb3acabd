//! Tests of fusion over a simulated group: the ranks are threads of this process.

mod failures;
mod layout;
mod simulation;
mod steps;
mod times;
