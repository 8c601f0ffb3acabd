//! Shared parts of the integration tests: runtimes with a time limit, connected streams, content that shows
//! every wrong byte, child processes, certificates, and a gRPC service that a test controls.
#![deny(unsafe_code)]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    missing_debug_implementations,
    reason = "code of tests"
)]

mod address;
#[allow(unsafe_code, reason = "a global allocator has no other form")]
mod allocator;
mod certificates;
mod child;
mod content;
mod greeter;
mod logs;
mod meters;
mod process;
mod roles;
mod runtime;
mod scenario;
mod streams;

pub use address::{BlackHole, Silence, SilentDevice, free_address};
pub use allocator::{Counting, Held, allocations_of_this_thread, held_by_this_process, held_by_this_thread};
pub use certificates::Authority;
pub use child::{Child, OpenCopy, ROLE, announce, is_alone, is_alone_with};
pub use content::{Content, hex, random_length, unhex};
pub use greeter::{ScriptedGreeter, outcome, say};
pub use logs::{Log, logged, logging};
pub use meters::Meters;
pub use process::{descriptors_and_mappings, raise_open_files, settled};
pub use roles::{WRITER_SEED, play};
pub use runtime::{Runtime, everywhere, until, within};
pub use scenario::{Over, Port, RunningServer, unchanged};
pub use streams::{config, echo_stream, listen, pair};
