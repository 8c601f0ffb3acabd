//! Completion queues and queue pairs of parts. Each test has a process of its own, because it counts what the whole
//! process asks of its device.

use std::sync::{Arc, Barrier};

use support::is_alone_with;
use tonic_rdma::Config;
use tonic_rdma_graph::schedule::ReceiveMode;
use tonic_rdma_graph::session::Listener;
use tonic_rdma_graph::transfer::TransferMode;
use tonic_rdma_verbs::counting;

use crate::chain::{Chain, Checks, connect_all, run};

const PARTS: usize = 2;
const MODE: TransferMode = TransferMode::RdmaZerocp;

/// Connects two parts, with this configuration or that of the environment, and runs steps. Returns the number of
/// completion queues, that of the queue pairs of both links at both ends, and how many of them sent anything
/// during the steps.
fn made(config: Option<Config>) -> (u64, u64, usize) {
    /// Each link is opened over a connection of its own, which has a queue pair at each end.
    const OF_CALLS: u64 = 2 * PARTS as u64;
    const STEPS: u64 = 3;
    let counter = counting::count_all();
    let start = counter.counts();
    let bind = |_| {
        let builder = Listener::builder().threads(1);
        let builder = config.iter().fold(builder, |builder, config| builder.config(config.clone()));
        builder.bind("127.0.0.1:0").unwrap()
    };
    let listeners: Vec<Listener> = (0..PARTS).map(bind).collect();
    let addresses: Vec<String> = listeners.iter().map(|listener| listener.address().to_string()).collect();
    let (chain, all) = (Arc::new(Chain::new(PARTS)), Barrier::new(PARTS));
    let results = connect_all(listeners, &addresses, &chain, &[MODE], 1, |_, session| {
        let session = session.unwrap();
        let transfers = session.transfers(MODE).unwrap();
        let mut executor = chain.executor(session.part(), transfers, 1, ReceiveMode::PollingAsync);
        all.wait();
        let (counts, before) = (counter.counts().since(&start), counter.queue_pairs());
        all.wait();
        run(&mut executor, 0..STEPS, &mut Checks::of(&chain)).unwrap();
        all.wait();
        let after = counter.queue_pairs();
        let sent = after.iter().filter(|(pair, now)| now.requests > before[pair].requests).count();
        all.wait();
        (counts.completion_queues.created, counts.queue_pairs.created - OF_CALLS, sent)
    });
    assert_eq!(results[0], results[1]);
    results[0]
}

#[test]
fn variables_and_the_builder_set_the_numbers_and_crossing_tensors_are_spread() {
    let variables = [("RDMA_COMPLETION_QUEUES", "2"), ("RDMA_QUEUE_PAIRS_PER_PEER", "3")];
    let test = "::variables_and_the_builder_set_the_numbers_and_crossing_tensors_are_spread";
    if !is_alone_with(&format!("{}{test}", module_path!()), &variables) {
        return;
    }
    let config = || Config::from_env().unwrap();
    let (parts, ends) = (PARTS as u64, 2 * PARTS as u64);
    // Each of the two links has its queue pairs at both ends, and the chain crosses often enough for all of them.
    assert_eq!(made(None), (parts * 2, ends * 3, 4 * 3));
    assert_eq!(made(Some(config().completion_queues(4))), (parts * 4, ends * 3, 4 * 3));
    assert_eq!(made(Some(config().queue_pairs_per_peer(4))), (parts * 2, ends * 4, 4 * 4));
    assert_eq!(made(Some(Config::default())), (parts, ends, 4));
}

#[test]
fn a_wrong_variable_is_named() {
    let variables = [("RDMA_QUEUE_PAIRS_PER_PEER", "0")];
    if !is_alone_with(&format!("{}::a_wrong_variable_is_named", module_path!()), &variables) {
        return;
    }
    let error = Listener::bind("127.0.0.1:0").unwrap_err();
    let expected = "RDMA_QUEUE_PAIRS_PER_PEER=\"0\": takes a number from 1 to 64";
    assert!(error.to_string().ends_with(expected), "{error}");
}
