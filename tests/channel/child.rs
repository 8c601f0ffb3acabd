//! The entry point of child processes.

use support::{Runtime, ScriptedGreeter, announce};
use tonic_rdma::CallConfig;

use crate::environment;
use crate::servers::Kind;

/// Does nothing when run as a test. In a child process, serves until the process is killed.
#[test]
fn role() {
    let Ok(role) = std::env::var(support::ROLE) else { return };
    if role == environment::ROLE {
        return environment::report();
    }
    let words: Vec<&str> = role.split(' ').collect();
    let ["serve", kind, address] = words[..] else { panic!("{role:?} is no role") };
    Runtime::Idle.run_for_ever(async {
        let greeter = ScriptedGreeter::new();
        let running = Kind::named(kind).serve_at(address, &greeter, CallConfig::default()).await;
        announce(running.address);
        std::future::pending::<()>().await;
    });
}
