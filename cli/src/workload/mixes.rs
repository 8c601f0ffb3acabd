//! Messages of ten buffers, small, medium and large, after TF-gRPC-Bench (Biswas, Lu and Panda, "Designing a
//! Micro-Benchmark Suite to Evaluate gRPC for TensorFlow", 2018), which measured the gRPC messages of TensorFlow.

use crate::workload::Message;
use tonic_rdma_payload::seeded::Draws;

/// Number of buffers of a message.
pub(crate) const BUFFERS: usize = 10;

/// Lengths of a small, a medium and a large buffer, in bytes.
const SMALL: u64 = 10;
const MEDIUM: u64 = 10 << 10;
const LARGE: u64 = 1 << 20;

/// Number of messages of `random` before the first repeats.
const RANDOM_CYCLE: usize = 64;
const RANDOM_SEED: u64 = 10;

/// The lengths of a message's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mix {
    /// Small, medium and large alternate: shares as equal as ten buffers allow.
    Uniform,
    /// Each length is drawn with the same probability, so messages differ. The sequence is equal in every run.
    Random,
    /// Six large, three medium, one small.
    Skew,
}

impl Mix {
    pub(crate) const ALL: [Self; 3] = [Self::Uniform, Self::Random, Self::Skew];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::Random => "random",
            Self::Skew => "skew",
        }
    }

    /// Describes a message, for people.
    pub(super) const fn describe(self) -> &'static str {
        match self {
            Self::Uniform => "a message of 10 buffers, 10 B, 10 KiB and 1 MiB in turn",
            Self::Random => "a message of 10 buffers, each 10 B, 10 KiB or 1 MiB by seeded draw",
            Self::Skew => "a message of 10 buffers, 6 of 1 MiB, 3 of 10 KiB, 1 of 10 B",
        }
    }

    /// Returns the messages of one cycle.
    pub(super) fn messages(self) -> Vec<Message> {
        match self {
            Self::Uniform => vec![[SMALL, MEDIUM, LARGE].into_iter().cycle().take(BUFFERS).collect()],
            Self::Random => {
                let mut draws = Draws::new(RANDOM_SEED);
                let mut buffer = || [SMALL, MEDIUM, LARGE][draws.choice(3)];
                (0..RANDOM_CYCLE).map(|_| (0..BUFFERS).map(|_| buffer()).collect()).collect()
            }
            // Short buffers stand between long ones.
            Self::Skew => {
                let (s, m, l) = (SMALL, MEDIUM, LARGE);
                vec![vec![l, m, l, l, m, l, l, m, l, s]]
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(message: &Message) -> [usize; 3] {
        [SMALL, MEDIUM, LARGE].map(|length| message.iter().filter(|bytes| **bytes == length).count())
    }

    #[test]
    fn mixes_have_their_documented_shares() {
        assert_eq!(Mix::Uniform.messages().iter().map(shares).collect::<Vec<_>>(), [[4, 3, 3]]);
        assert_eq!(Mix::Skew.messages().iter().map(shares).collect::<Vec<_>>(), [[1, 3, 6]]);
        assert_eq!(Mix::Uniform.messages()[0].iter().sum::<u64>(), 3_176_488);
    }

    #[test]
    fn random_messages_differ_and_are_the_same_in_every_run() {
        let messages = Mix::Random.messages();
        assert_eq!(messages, Mix::Random.messages());
        assert_eq!(messages.len(), RANDOM_CYCLE);
        assert!(messages.iter().all(|message| shares(message).iter().sum::<usize>() == BUFFERS));
        let mut distinct = messages.clone();
        distinct.sort();
        distinct.dedup();
        assert!(distinct.len() > RANDOM_CYCLE * 9 / 10, "{} distinct", distinct.len());
        let total =
            messages.iter().map(shares).fold([0; 3], |sum, shares| [0, 1, 2].map(|i| sum[i] + shares[i]));
        assert!(total.iter().all(|count| (180..250).contains(count)), "{total:?} of 640");
    }
}
