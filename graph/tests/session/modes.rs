//! All modes carry every byte.

use std::sync::Arc;

use tonic_rdma_graph::GraphErrorKind;
use tonic_rdma_graph::placement::Part;
use tonic_rdma_graph::schedule::{self, ReceiveMode};
use tonic_rdma_graph::session::Session;
use tonic_rdma_graph::transfer::TransferMode;

use crate::chain::{Chain, Checks, Registered, in_threads, run};

/// Runs steps in each mode, and checks results and counts.
fn all_modes(chain: &Arc<Chain>, window: usize, receive: ReceiveMode, session: &Session) {
    const STEPS: u64 = 4;
    let part = session.part();
    let mut first = 0;
    for mode in session.modes() {
        let mut executor = chain.executor(part, session.transfers(*mode).unwrap(), window, receive);
        let mut program = Checks::of(chain);
        run(&mut executor, first..first + STEPS, &mut program).unwrap();
        first += STEPS;
        let last = chain.placements.partition().parts()[chain.graph.len() - 1];
        assert_eq!(program.results.len() as u64, if part == last { STEPS } else { 0 });
        for crossing in chain.placements.crossings() {
            let counts = executor.counts(crossing.id);
            let name = format!("{mode}: {}", crossing.name);
            if crossing.from != part {
                // The values of this test have no memory that a device writes.
                let received = if crossing.to == part { STEPS } else { 0 };
                let (received, received_copied) = (received, received);
                let expected = schedule::CrossingCounts { received, received_copied, ..Default::default() };
                assert_eq!(counts, expected, "{name}");
                continue;
            }
            assert_eq!(counts.sent, STEPS, "{name}");
            match mode {
                TransferMode::RdmaZerocp | TransferMode::RdmaInPlace => {
                    assert_eq!(counts.copied, 0, "{name}")
                }
                TransferMode::RdmaCp => assert_eq!(counts.copied + counts.inline, STEPS, "{name}"),
                _ => assert_eq!((counts.copied, counts.inline), (STEPS, 0), "{name}"),
            }
            let large = !crossing.placement.is_static() || counts.bytes > STEPS * 4096;
            assert!(counts.inline == 0 || !large, "{name}: {counts:?}");
        }
    }
}

fn sessions(parts: usize, window: usize, receive: ReceiveMode) {
    let chain = Arc::new(Chain::new(parts));
    let addresses = in_threads(&chain, &TransferMode::ALL, window, |session| {
        all_modes(&chain, window, receive, &session);
        session.addresses_distributed()
    });
    // Both modes with static slots have all of them.
    let crossings = chain.placements.crossings();
    let of = |side: fn(&tonic_rdma_graph::placement::Crossing) -> Part, part| {
        2 * crossings.iter().filter(|it| it.placement.is_static() && side(it) == part).count()
    };
    for (part, addresses) in addresses.into_iter().enumerate() {
        assert_eq!(addresses.learned, of(|it| it.from, Part(part)));
        assert_eq!(addresses.given, of(|it| it.to, Part(part)));
    }
}

#[test]
fn two_parts_one_step_at_a_time() {
    sessions(2, 1, ReceiveMode::PollingAsync);
}

#[test]
fn two_parts_with_a_window_and_blocking_receives() {
    sessions(2, 3, ReceiveMode::Blocking);
}

#[test]
fn four_parts_with_a_window() {
    sessions(4, 2, ReceiveMode::PollingAsync);
}

#[test]
fn four_parts_with_callbacks() {
    sessions(4, 3, ReceiveMode::Callback);
}

#[test]
fn transfers_are_taken_once_and_only_those_of_the_session() {
    let chain = Arc::new(Chain::new(2));
    in_threads(&chain, &[TransferMode::GrpcTcp, TransferMode::RdmaCp], 1, |session| {
        let error = session.transfers::<Registered>(TransferMode::RdmaZerocp).err().unwrap();
        assert_eq!(error.to_string(), "mode: rdma-zerocp: this session was made for grpc-tcp and rdma-cp");
        let _taken = session.transfers::<Registered>(TransferMode::RdmaCp).unwrap();
        let error = session.transfers::<Registered>(TransferMode::RdmaCp).err().unwrap();
        assert!(
            error.kind() == GraphErrorKind::InvalidSetting && error.reason().starts_with("mode: "),
            "{error}"
        );
    });
}
