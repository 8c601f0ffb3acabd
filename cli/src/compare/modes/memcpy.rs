//! The mode `memcpy`: the same bytes, copied within the client. It shows the limit of the machine's memory.
//!
//! The destination is one buffer, as warm as those of other modes. A copy holds the buffer's lock, so copies
//! never overlap, whatever the number of calls in flight.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Mutex;
use tonic_rdma_commands::payload::content::{SHARE, check_all, check_stamps};
use tonic_rdma_commands::payload::reduce::{Reduced, reduce_all};
use tonic_rdma_commands::payload::seeded::mix;
use tonic_rdma_proto::transfer::Check;

use crate::compare::modes::call_error::CallError;
use crate::compare::operations::{self, DESTINATION_SEED, Layout, Operation, Operations};

/// The longest time that copies follow one another before other tasks of the runtime run.
const YIELD_AFTER: Duration = Duration::from_millis(1);

/// The mode's client and server in one. Clones share the destination.
#[derive(Clone, Debug)]
pub(crate) struct MemcpyCaller {
    destination: Arc<Mutex<Destination>>,
    /// Whether the client consumes the copies.
    reduces: bool,
}

#[derive(Debug)]
struct Destination {
    memory: Vec<u8>,
    layout: Layout,
    /// Number of operations so far. The check derives the sampled offsets from it, so that they differ from
    /// operation to operation.
    draws: u64,
    /// Time at which other tasks last ran.
    yielded: Instant,
}

impl MemcpyCaller {
    pub(crate) fn new(reduces: bool) -> Self {
        let destination =
            Destination { memory: Vec::new(), layout: Layout::default(), draws: 0, yielded: Instant::now() };
        Self { destination: Arc::new(Mutex::new(destination)), reduces }
    }

    /// Allocates memory for the largest of `operations`. A first copy, outside the measured time, warms the
    /// memory.
    pub(crate) async fn prepare(&mut self, operations: &Operations) -> Result<(), CallError> {
        let room = operations::room(operations.load);
        let mut destination = self.destination.lock().await;
        let bytes = usize::try_from(room).map_err(|_| CallError::Memory(room))?;
        let mut memory = Vec::new();
        memory.try_reserve_exact(bytes).map_err(|_| CallError::Memory(room))?;
        memory.resize(bytes, 0);
        destination.memory = memory;
        destination.layout = Layout::of(operations.load, DESTINATION_SEED);
        Ok(())
    }

    /// Copies `operation`, checks and consumes the copy, and returns the time that this took.
    pub(crate) async fn run(&mut self, operation: &Operation, check: Check) -> Result<Duration, CallError> {
        let mut destination = self.destination.lock().await;
        let start = Instant::now();
        destination.copy(operation)?;
        destination.check(operation, check, self.reduces)?;
        let arrived = self.reduces.then(|| destination.reduced(operation));
        let end = Instant::now();

        let sent = operation.reduced();
        if arrived.is_some() && arrived != sent {
            return Err(CallError::Consumed { sent, arrived });
        }
        // This function never waits, so other tasks run only if it yields.
        if end - destination.yielded > YIELD_AFTER {
            destination.yielded = end;
            drop(destination);
            tokio::task::yield_now().await;
        }
        Ok(end - start)
    }

    /// Frees the destination.
    pub(crate) async fn release(&mut self) {
        self.destination.lock().await.memory = Vec::new();
    }
}

impl Destination {
    fn copy(&mut self, operation: &Operation) -> Result<(), CallError> {
        let Self { memory, layout, .. } = self;
        let lengths = operation.buffers().map(|(_, buffer)| buffer.len() as u64);
        for ((_, buffer), offset) in operation.buffers().zip(layout.offsets(lengths)) {
            let target = memory.get_mut(offset as usize..).and_then(|rest| rest.get_mut(..buffer.len()));
            // The memory was made for the largest operation, so this operation belongs to another cell.
            target.ok_or(CallError::Memory(buffer.len() as u64))?.copy_from_slice(buffer);
        }
        Ok(())
    }

    /// Checks the copies as the receivers of other modes do.
    fn check(&mut self, operation: &Operation, check: Check, reduces: bool) -> Result<(), CallError> {
        self.draws += 1;
        let (draws, draw) = (self.draws, mix(self.draws));
        let seeds = operation.buffers().map(|(seed, _)| seed);
        for ((index, arrived), seed) in (0u64..).zip(self.arrived(operation)).zip(seeds) {
            let every_byte = check == Check::All || (!reduces && (draws + index).is_multiple_of(SHARE));
            let mismatch = match every_byte {
                false => check_stamps(seed, arrived, draw.wrapping_add(index)),
                true => check_all(seed, arrived),
            };
            if let Some(offset) = mismatch {
                return Err(CallError::BufferContent { buffer: index, offset });
            }
        }
        Ok(())
    }

    fn reduced(&self, operation: &Operation) -> Reduced {
        reduce_all(self.arrived(operation))
    }

    /// Returns the copied buffers of `operation`, which must be the last that was copied.
    fn arrived(&self, operation: &Operation) -> impl Iterator<Item = &[u8]> {
        let lengths = operation.buffers().map(|(_, buffer)| buffer.len() as u64);
        let targets = self.layout.offsets(lengths).zip(operation.buffers());
        targets.map(|(offset, (_, buffer))| &self.memory[offset as usize..][..buffer.len()])
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use super::*;
    use crate::workload::{Mix, Workload};

    const LOADS: [Workload; 4] =
        [Workload::Size(64), Workload::Size(100_001), Workload::Mix(Mix::Random), Workload::Blocks];

    #[tokio::test]
    async fn copies_equal_the_payloads_for_every_load() {
        let mut caller = MemcpyCaller::new(true);
        for load in LOADS {
            let operations = Operations::new(load, 3, true).unwrap();
            caller.prepare(&operations).await.unwrap();
            for trial in 0..5 {
                for check in [Check::All, Check::Stamps] {
                    caller.run(&operations.take(trial), check).await.unwrap();
                }
            }
            let destination = caller.destination.lock().await;
            let operation = operations.take(4);
            assert!(destination.arrived(&operation).eq(operation.buffers().map(|(_, buffer)| &buffer[..])));
        }
        caller.release().await;
        assert_eq!(caller.destination.lock().await.memory.capacity(), 0);
    }

    #[tokio::test]
    async fn wrong_content_and_a_wrong_maximum_are_found() {
        let operations = Operations::new(Workload::Size(4096), 3, true).unwrap();
        let mut caller = MemcpyCaller::new(true);
        caller.prepare(&operations).await.unwrap();
        let right = operations.take(0);
        let wrong = right.changed(|put| {
            let mut payload = put.buffers[0].to_vec();
            payload[4095] ^= 1;
            put.buffers = vec![payload.into()];
        });
        let error = caller.run(&wrong, Check::Stamps).await.unwrap_err();
        assert!(matches!(error, CallError::BufferContent { buffer: 0, offset: 4095 }), "{error}");
        let wrong = right.changed(|put| put.reduced = None);
        let error = caller.run(&wrong, Check::All).await.unwrap_err();
        assert!(matches!(error, CallError::Consumed { sent: None, arrived: Some(_) }), "{error}");
    }

    #[tokio::test]
    async fn a_torn_middle_is_found() {
        let operations = Operations::new(Workload::Size(1 << 20), 3, true).unwrap().torn(500_032..500_096);
        for (reduces, within) in [(true, 1), (false, 2 * SHARE)] {
            let mut caller = MemcpyCaller::new(reduces);
            caller.prepare(&operations).await.unwrap();
            let mut error = None;
            for trial in 0..within {
                error = error.or(caller.run(&operations.take(trial as usize), Check::Stamps).await.err());
            }
            assert!(error.unwrap().is_mismatch());
        }
    }

    #[tokio::test]
    async fn an_operation_without_preparation_is_an_error() {
        let operation = Operations::new(Workload::Size(4096), 3, false).unwrap().take(0);
        let error = MemcpyCaller::new(false).run(&operation, Check::All).await.unwrap_err();
        assert!(matches!(error, CallError::Memory(4096)) && !error.is_mismatch(), "{error}");
    }
}
