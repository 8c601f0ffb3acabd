//! A process that forks without exec: its child has copies of all its objects, but can't harm its
//! connections.
//!
//! The family is this binary, started again, so that the forking process has no other tests.

#![allow(clippy::print_stdout, reason = "tests")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::sync::Arc;

use tonic_rdma_verbs::{
    CompletionOpcode, HostMemory, Operation, Payload, VerbsError, VerbsErrorKind, WorkCompletion, soft,
};

use crate::Soft;
use crate::fabric::{ALL, Side, default_pair, pattern};

/// The environment variable that makes [`family`] run.
const FAMILY: &str = "TONIC_RDMA_FORK";
/// Time after which the kernel ends a child that hangs, in seconds.
const TIMEOUT: u32 = 60;

/// Forks, runs `child` in the child, and returns whether it succeeded.
fn in_child(child: impl FnOnce()) -> bool {
    // SAFETY: this process has no thread that holds a lock of the C library or of the test, and the child
    // ends in this function.
    let process = unsafe { libc::fork() };
    assert!(process >= 0, "{}", std::io::Error::last_os_error());
    if process == 0 {
        // SAFETY: sets a timer of the child, whose signal ends it.
        unsafe { libc::alarm(TIMEOUT) };
        let failed = catch_unwind(AssertUnwindSafe(child)).is_err();
        // SAFETY: ends the child without the destructors of the test harness.
        unsafe { libc::_exit(i32::from(failed)) };
    }
    let mut status = 0;
    // SAFETY: the status is writable.
    assert_eq!(unsafe { libc::waitpid(process, &raw mut status, 0) }, process);
    if status != 0 {
        println!("the child's status is {status:#x}");
    }
    status == 0
}

/// Sends, writes and reads between `one` and `two`.
fn exchange(one: &Side, two: &Side, seed: u64) {
    two.post_receive(1, 0, 4096);
    one.fill(0, &pattern(seed, 4096));
    one.send(2, 0, 4096);
    one.expect(2, CompletionOpcode::Send);
    two.expect(1, CompletionOpcode::Receive);
    assert_eq!(two.content(0, 4096), pattern(seed, 4096));
    one.write(3, one.segment(0, 4096), two.remote(8192));
    one.expect(3, CompletionOpcode::Write);
    assert_eq!(two.content(8192, 4096), pattern(seed, 4096));
    one.read(4, one.segment(16384, 4096), two.remote(8192));
    one.expect(4, CompletionOpcode::Read);
    assert_eq!(one.content(16384, 4096), pattern(seed, 4096));
}

#[test]
fn a_child_leaves_the_connections_of_its_parent_alone() {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["forking::family", "--exact", "--nocapture", "--test-threads=1"])
        .env(FAMILY, "1")
        .output()
        .unwrap();
    let printed = |bytes| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}{}", printed(&output.stdout), printed(&output.stderr));
}

#[test]
fn a_child_does_not_hide_the_death_of_its_parent() {
    crate::processes::killed_while_its_child_lives(&Soft);
}

/// Runs in a process of its own. Without [`FAMILY`] this test does nothing.
#[test]
fn family() {
    if std::env::var_os(FAMILY).is_none() {
        return;
    }
    let (one, two) = default_pair(&Soft);
    exchange(&one, &two, 1);

    // A WRITE has come that no thread has carried out, and threads of the parent check for such work.
    let work = Arc::clone(two.pair.local().unwrap());
    work.need_no_events();
    two.fill(8192, &pattern(9, 4096));
    one.fill(0, &pattern(8, 4096));
    one.post(
        3,
        Operation::Write {
            data: Payload::Registered(&[one.segment(0, 4096)]),
            remote: two.remote(8192),
            immediate: None,
        },
    );
    let idle = in_child(|| {
        two.pair.local().unwrap().progress();
        assert!(!work.progress(), "the child carries out work of its parent");
        assert!(!work.need_no_events(), "the child takes requests of its parent back");
        work.need_events();
    });
    assert!(idle, "the child took part in the work of its parent");
    assert!(
        work.progress() || two.content(8192, 4096) == pattern(8, 4096),
        "the work is not the parent's any more"
    );
    one.expect(3, CompletionOpcode::Write);
    assert_eq!(two.content(8192, 4096), pattern(8, 4096));

    // Each call of the child on an object of its parent fails.
    let refused = in_child(|| {
        let unusable = |error: VerbsError| assert_eq!(error.kind(), VerbsErrorKind::Unusable, "{error}");
        unusable(one.context.create_completion_queue(4).unwrap_err());
        unusable(one.context.alloc_protection_domain().unwrap_err());
        let memory = Arc::new(HostMemory::shared(4096, 4096).unwrap());
        unusable(one.domain.register(memory, ALL).unwrap_err());
        let data = [one.segment(0, 8)];
        let send = Operation::Send { data: Payload::Registered(&data), immediate: None };
        assert!(one.try_post(7, send).is_err());
        assert!(two.try_post_receive(7, &[two.segment(0, 8)]).is_err());
        let mut completions = [WorkCompletion::EMPTY; 4];
        assert_eq!(two.queue.poll(&mut completions), 0);
    });
    assert!(refused, "a call of the child did not fail");
    exchange(&one, &two, 2);

    // The child runs all destructors.
    let mut sides = Some((one, two));
    assert!(in_child(|| drop(sides.take())), "the child's destructors failed");
    let (one, two) = sides.unwrap();
    exchange(&one, &two, 3);

    // The child may open a device of its own.
    let own = in_child(|| {
        let device = soft::open().unwrap();
        assert!(!Arc::ptr_eq(&device, &one.context));
        let (first, second) = default_pair(&Soft);
        exchange(&first, &second, 4);
    });
    assert!(own, "the child's own device does not work");
    exchange(&one, &two, 5);
}
