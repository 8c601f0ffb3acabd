//! The child processes that these tests start.

use support::{ROLE, announce, raise_open_files};
use tonic_rdma::{Config, PollMode};
use tonic_rdma_verbs::counting::{self, Counts, Limits};

use crate::queues::{LIMIT, OF_PROCESS, ranks, ranks_of_large_group};

/// The ranks of a child process, on a device with the limits of a card.
#[test]
fn role() {
    let role = std::env::var(ROLE).unwrap_or_default();
    let words: Vec<&str> = role.split(' ').collect();
    let ["ranks", first, address] = words[..] else { return };
    let first: usize = first.parse().unwrap();
    raise_open_files();
    let counter = counting::count_all();
    counter.limit(Limits::CARD);
    // A rank alone pins less than the default allows. So many ranks on one machine must not spin.
    let config = Config::from_env().unwrap().pinned_limit(1 << 40).poll_mode(PollMode::Event);
    let config = config.handshake_timeout(LIMIT);
    let added = ranks(first..first + OF_PROCESS, ranks_of_large_group(), address, Some(&config), |rank| {
        if rank == first {
            let counts = counter.counts();
            let Counts { completion_queues, queue_pairs, domains, regions, .. } = counts;
            let [queues, pairs, domains, regions] =
                [completion_queues, queue_pairs, domains, regions].map(|of| of.alive());
            announce(format!("{queues} {pairs} {domains} {regions}"));
            // The parent closes it when all ranks have added their numbers.
            std::io::read_to_string(std::io::stdin()).unwrap();
        }
    });
    let failures: Vec<_> = added.into_iter().filter_map(Result::err).map(|error| error.to_string()).collect();
    assert!(failures.is_empty(), "{failures:#?}");
}
