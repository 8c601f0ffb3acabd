#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeSet;
use std::time::Duration;

use super::*;
use crate::error::RdmaErrorKind;

/// A value of one setting: as the text of a variable, and as a call of a setter.
struct Case {
    /// The name of the setter.
    setter: &'static str,
    text: String,
    set: Box<dyn Fn(Config) -> Config>,
}

impl Case {
    /// The name of the variable, by the rule: that of the setter.
    fn variable(&self) -> String {
        format!("RDMA_{}", self.setter.to_uppercase())
    }
}

/// Cases of one setter: the text of the variable, and the argument of the setter.
macro_rules! cases {
    // Numbers at and beyond the limits of a setting, and the argument that each makes.
    ($cases:ident: $setter:ident, [$($number:expr),+], $argument:expr) => {
        for number in [$($number),+] {
            let argument = $argument;
            cases!($cases: $setter, number => argument(number));
        }
    };
    ($cases:ident: $setter:ident, $($text:expr => $argument:expr),+) => {
        $cases.extend([$(Case {
            setter: stringify!($setter),
            text: $text.to_string(),
            set: Box::new(move |config| config.$setter($argument)),
        }),+]);
    };
}

fn cases() -> Vec<Case> {
    let (micros, millis) = (Duration::from_micros, Duration::from_millis);
    let mut all: Vec<Case> = Vec::new();
    cases!(all: policy, "require" => Policy::Require);
    cases!(all: provider, "auto" => None, "ibverbs" => Provider::Ibverbs);
    cases!(all: poll_mode, "event" => PollMode::Event);
    cases!(all: shared_receive, "never" => SharedReceive::Never);
    cases!(all: plaintext_tensors, "allow" => true);
    cases!(all: in_process, "yes" => true, "No" => false);
    cases!(all: histograms, "yes" => true, "No" => false);
    cases!(all: poll_cpus, "0,1023" => [0, 1023], "2,1024" => [2, 1024]);
    for name in ["mlx5_0", "", "../x", "a b", "\u{fc}", &"x".repeat(64), &"x".repeat(65)].map(str::to_owned) {
        cases!(all: device, name => &*name);
    }
    cases!(all: device_port, [0, 1, 255], |port| port);
    cases!(all: gid_index, [0, 255], |index| index);
    cases!(all: spin_limit, [0, 1_000_000, 1_000_001, u64::MAX], micros);
    cases!(all: completion_queues, [0, 1, 64, 65], |count| count);
    cases!(all: queue_pairs_per_peer, [0, 1, 64, 65], |count| count);
    cases!(all: eager_threshold, [0, 1, u64::MAX], EagerThreshold::Bytes);
    cases!(all: chunk_size, [0, 4095, 4096, 16 << 20, (16 << 20) + 1], |bytes| bytes);
    cases!(all: receive_slots, [0, 15, 16, 1024, 1025], |slots| slots);
    cases!(all: slot_size, [0, 1023, 1024, 65_536, 65_537], |bytes| bytes);
    cases!(all: max_inline, [0, u32::MAX], |bytes| bytes);
    cases!(all: qp_queue_depth, [0, 63, 64, 4096, 4097], |depth| depth);
    cases!(all: pinned_limit, [0, (1 << 20) - 1, 1 << 20, 1 << 50, (1 << 50) + 1], |bytes| bytes);
    cases!(all: connection_limit, [0, (1 << 20) - 1, 1 << 20, 1 << 50, (1 << 50) + 1], |bytes| bytes);
    cases!(all: held_limit, [0, (1 << 20) - 1, 1 << 20, 1 << 50, (1 << 50) + 1], |bytes| bytes);
    cases!(all: handshake_timeout, [0, 1, 600_000, 600_001], millis);
    cases!(all: connect_timeout, [0, 1, 86_400_000, 86_400_001], millis);
    cases!(all: ping_interval, [0, 1, 86_400_000, 86_400_001], millis);
    cases!(all: ping_timeout, [0, 1, 86_400_000, 86_400_001], millis);
    cases!(all: qp_timeout, [0, 31, 32, 255], |exponent| exponent);
    cases!(all: qp_retry_count, [0, 7, 8], |count| count);
    cases!(all: qp_sl, [0, 15, 16], |level| level);
    cases!(all: qp_mtu, [0, 255, 256, 1500, 4096, 8192], |bytes| bytes);
    cases!(all: qp_pkey_index, [65_535], |index| index);
    cases!(all: traffic_class, [255], |class| class);
    all
}

#[test]
fn code_and_environment_refuse_equal_values() {
    for case in cases() {
        let (variable, text) = (case.variable(), &case.text);
        let from_code = (case.set)(Config::default());
        let read = Config::from_variables(|asked| (asked == variable).then(|| text.clone().into()));
        match (from_code.validate(), read) {
            (Ok(()), Ok(read)) => assert_eq!(from_code, read, "{variable}={text}"),
            (Err(code), Err(read)) => {
                for error in [&code, &read] {
                    assert_eq!(error.kind(), RdmaErrorKind::InvalidSetting);
                    assert_eq!((error.setting(), error.variable()), (Some(case.setter), Some(&*variable)));
                }
                assert_eq!(read.value(), Some(&**text));
                assert!(code.to_string().starts_with(&format!("Config::{}", case.setter)), "{code}");
                assert!(read.to_string().starts_with(&variable), "{read}");
            }
            (code, read) => panic!("{variable}={text}: code has {code:?}, environment {read:?}"),
        }
    }
}

/// `Case::variable` derives the name from the setter.
#[test]
fn setters_and_variables_have_equal_names() {
    let asked = std::cell::RefCell::new(BTreeSet::new());
    let unset = |name: &str| {
        asked.borrow_mut().insert(name.to_owned());
        None
    };
    assert_eq!(Config::from_variables(unset), Ok(Config::default()));
    let compared: BTreeSet<String> = cases().iter().map(Case::variable).collect();
    let mut asked = asked.into_inner();
    // The software device reads two of these, and there are no setters. One is a former name, which is
    // refused.
    for variable in ["RDMA_SOFT_DIR", "RDMA_SOFT_PEERS", "RDMA_CQS"] {
        assert!(asked.remove(variable));
    }
    assert_eq!(compared, asked);
}

#[test]
fn durations_are_checked_below_their_unit() {
    let config = Config::default().handshake_timeout(Duration::from_micros(999));
    assert_eq!(config.validate().unwrap_err().setting(), Some("handshake_timeout"));
    let config = Config::default().spin_limit(Duration::from_secs(1) + Duration::from_nanos(1));
    assert_eq!(config.validate().unwrap_err().setting(), Some("spin_limit"));
}

/// Of these settings, `linger` has no variable.
#[test]
fn times_have_limits() {
    let refused = |config: Config| config.validate().unwrap_err().setting().unwrap();
    let (second, none) = (Duration::from_secs(1), Duration::ZERO);
    // A ping without a pause would keep the connection's task busy forever, and a time beyond the clock's
    // range would panic.
    for bad in [none, Duration::from_micros(999), Duration::from_secs(24 * 3600 + 1), Duration::MAX] {
        assert_eq!(refused(Config::default().ping_interval(bad)), "ping_interval");
        assert_eq!(refused(Config::default().ping_timeout(bad)), "ping_timeout");
        assert_eq!(refused(Config::default().connect_timeout(bad)), "connect_timeout");
    }
    assert_eq!(refused(Config::default().linger(Duration::MAX)), "linger");
    for good in [Duration::from_millis(1), second, Duration::from_secs(24 * 3600)] {
        let config = Config::default().ping_interval(good).ping_timeout(good);
        assert_eq!(config.connect_timeout(good).linger(good).validate(), Ok(()));
    }
    assert_eq!(Config::default().linger(none).validate(), Ok(()));
    let error = Config::default().linger(Duration::MAX).validate().unwrap_err().to_string();
    assert!(error.ends_with("takes a time from 0ns to 86400s"), "{error}");
}
