//! The closed loop: each caller makes its next call when it has the answer to the last one.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::task::JoinSet;
use tonic_rdma_proto::transfer::Check;

use super::outcome::TurnOutcome;
use crate::compare::modes::call_error::CallError;
use crate::compare::modes::caller::Caller;
use crate::compare::operations::Operations;
use crate::compare::operations::sequence::{Done, Position};

/// Keeps `callers` operations in flight until `length` is over, each with `width` calls at once. Every caller makes at
/// least one operation. If this future is dropped, `turn` has the results so far. `missing` counts the callers that
/// have not ended.
pub(crate) async fn run(
    caller: &Caller,
    operations: &Operations,
    position: &Position,
    (callers, width): (usize, usize),
    length: Duration,
    turn: &mut TurnOutcome,
    missing: &mut u64,
) {
    let end = Instant::now() + length;
    let (caller, operations, position) = (caller.clone(), operations.clone(), Arc::clone(position));
    if callers == 1 && stays_in_block_on(&caller) {
        *missing = 1;
        let ended = match caller {
            Caller::Placement(caller) => caller.keep_sending(operations, position, 1, end).await,
            caller => keep_calling(caller, operations, position, width, end).await,
        };
        *missing = 0;
        return count(ended, turn);
    }
    let mut under_way = JoinSet::new();
    if let Caller::Placement(caller) = caller {
        under_way.spawn(caller.keep_sending(operations, position, callers, end));
    } else {
        for _ in 0..callers {
            let (caller, operations, position) = (caller.clone(), operations.clone(), Arc::clone(&position));
            under_way.spawn(keep_calling(caller, operations, position, width, end));
        }
    }
    *missing = under_way.len() as u64;
    while let Some(ended) = under_way.join_next().await {
        *missing -= 1;
        match ended {
            Ok(ended) => count(ended, turn),
            Err(crash) => turn.error(1, crash.to_string()),
        }
    }
}

/// Returns whether a single caller makes its calls in the future that `block_on` was given, and not in a task of its
/// own.
///
/// In a multi-thread runtime that future runs on the main thread, which is no worker. A program whose `#[tokio::main]`
/// function calls, waits for the answer, and calls again makes its calls there. A caller that polls is a task even
/// there, on a worker of its own. In a runtime of one thread all callers are tasks, which makes next to no difference.
fn stays_in_block_on(caller: &Caller) -> bool {
    let polls = matches!(caller, Caller::Placement(caller) if !caller.awaits());
    !polls && Handle::current().runtime_flavor() == RuntimeFlavor::MultiThread
}

fn count((done, error): (Vec<Done>, Option<CallError>), turn: &mut TurnOutcome) {
    for (latency, bytes, messages) in done {
        turn.success(latency, bytes, messages);
    }
    if let Some(error) = error {
        turn.call_error(&error);
    }
}

/// Makes calls one after the other until `end`, at least one. An error ends the loop, so that a broken connection does
/// not cause a busy loop.
async fn keep_calling(
    mut caller: Caller,
    operations: Operations,
    position: Position,
    width: usize,
    end: Instant,
) -> (Vec<Done>, Option<CallError>) {
    let mut done = Vec::new();
    loop {
        let operation = operations.take(position.fetch_add(1, Ordering::Relaxed));
        match caller.run(&operation, Check::Stamps, width).await {
            Ok(latency) => done.push((latency, operation.bytes(), operation.messages())),
            Err(error) => return (done, Some(error)),
        }
        if Instant::now() >= end {
            return (done, None);
        }
    }
}
