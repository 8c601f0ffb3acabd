#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeSet;
use std::time::Duration;

use super::*;

/// A value of one setting: as the text of a variable, and as a call of a setter.
struct Case {
    variable: &'static str,
    text: String,
    set: Box<dyn Fn(Config) -> Config>,
}

fn case(variable: &'static str, text: impl ToString, set: impl Fn(Config) -> Config + 'static) -> Case {
    Case { variable, text: text.to_string(), set: Box::new(set) }
}

/// Cases for the numbers at and beyond both limits of a setting.
fn numbers(
    variable: &'static str,
    values: impl IntoIterator<Item = u64>,
    set: impl Fn(Config, u64) -> Config + Copy + 'static,
) -> Vec<Case> {
    values.into_iter().map(|value| case(variable, value, move |config| set(config, value))).collect()
}

fn path(change: impl Fn(&mut PathSettings) + 'static) -> impl Fn(Config) -> Config {
    move |config| {
        let mut path = config.path().clone();
        change(&mut path);
        config.path_settings(path)
    }
}

fn cases() -> Vec<Case> {
    let micros = Duration::from_micros;
    let mut cases = vec![
        case("RDMA_POLICY", "require", |config| config.policy(Policy::Require)),
        case("RDMA_PROVIDER", "ibverbs", |config| config.provider(ProviderChoice::Ibverbs)),
        case("RDMA_POLL_MODE", "event", |config| config.poll_mode(PollMode::Event)),
        case("RDMA_SHARED_RECEIVE", "never", |config| config.shared_receive(SharedReceive::Never)),
        case("RDMA_PLAINTEXT_TENSORS", "allow", |config| config.plaintext_tensors(true)),
        case("RDMA_TUNE_CACHE", "off", |config| config.tune_cache(TuneCache::Off)),
        case("RDMA_TUNE_CACHE", "/c", |config| config.tune_cache(TuneCache::Directory("/c".into()))),
        case("RDMA_TUNE_CACHE", "", |config| config.tune_cache(TuneCache::Directory("".into()))),
        case("RDMA_POLL_CPUS", "0,1023", |config| config.poll_cpus([0, 1023])),
        case("RDMA_POLL_CPUS", "2,1024", |config| config.poll_cpus([2, 1024])),
    ];
    for name in ["mlx5_0", "", "../x", "a b", "\u{fc}", &"x".repeat(64), &"x".repeat(65)] {
        let owned = name.to_owned();
        cases.push(case("RDMA_DEVICE", name, move |config| config.device(owned.clone())));
    }
    cases.extend(numbers("RDMA_DEVICE_PORT", [0, 1, 255], |config, port| config.device_port(port as u8)));
    cases.extend(numbers("RDMA_GID_INDEX", [0, 255], |config, index| config.gid_index(index as u8)));
    cases.extend(numbers("RDMA_SPIN_LIMIT", [0, 1_000_000, 1_000_001, u64::MAX], move |config, limit| {
        config.spin_limit(micros(limit))
    }));
    cases.extend(numbers("RDMA_CQS", [0, 1, 64, 65], |config, count| {
        config.completion_queues(count as usize)
    }));
    cases.extend(numbers("RDMA_EAGER_THRESHOLD", [0, 1, u64::MAX], |config, bytes| {
        config.eager_threshold(EagerThreshold::Bytes(bytes))
    }));
    cases.extend(numbers("RDMA_CHUNK_SIZE", [0, 4095, 4096, 16 << 20, (16 << 20) + 1], |config, bytes| {
        config.chunk_size(bytes as usize)
    }));
    let slot_size = Config::default().slot_size;
    cases.extend(numbers("RDMA_RECEIVE_SLOTS", [0, 15, 16, 1024, 1025], move |config, slots| {
        config.receive_buffers(slots as u32, slot_size)
    }));
    let slots = Config::default().receive_slots;
    cases.extend(numbers("RDMA_SLOT_SIZE", [0, 1023, 1024, 65_536, 65_537], move |config, size| {
        config.receive_buffers(slots, size as u32)
    }));
    cases.extend(numbers("RDMA_MAX_INLINE", [0, u64::from(u32::MAX)], |config, bytes| {
        config.max_inline(bytes as u32)
    }));
    cases.extend(numbers("RDMA_QP_QUEUE_DEPTH", [0, 63, 64, 4096, 4097], |config, depth| {
        config.queue_depth(depth as u32)
    }));
    cases.extend(numbers(
        "RDMA_PINNED_LIMIT",
        [0, (1 << 20) - 1, 1 << 20, 1 << 50, (1 << 50) + 1],
        Config::pinned_limit,
    ));
    cases.extend(numbers("RDMA_HANDSHAKE_TIMEOUT", [0, 1, 600_000, 600_001], |config, millis| {
        config.handshake_timeout(Duration::from_millis(millis))
    }));
    for value in [0_u8, 31, 32, 255] {
        cases.push(case("RDMA_QP_TIMEOUT", value, path(move |path| path.timeout = value)));
    }
    for value in [0_u8, 7, 8] {
        cases.push(case("RDMA_QP_RETRY_COUNT", value, path(move |path| path.retry_count = value)));
    }
    for value in [0_u8, 15, 16] {
        cases.push(case("RDMA_QP_SL", value, path(move |path| path.service_level = value)));
    }
    for value in [0_u16, 255, 256, 1500, 4096, 8192] {
        cases.push(case("RDMA_QP_MTU", value, path(move |path| path.mtu = Some(value))));
    }
    cases.push(case("RDMA_QP_PKEY_INDEX", 65_535, path(|path| path.pkey_index = 65_535)));
    cases.push(case("RDMA_TRAFFIC_CLASS", 255, path(|path| path.traffic_class = 255)));
    cases
}

#[test]
fn code_and_environment_refuse_equal_values() {
    for Case { variable, text, set } in cases() {
        let from_code = set(Config::default());
        let read = Config::from_variables(|asked| (asked == variable).then(|| text.clone().into()));
        match (from_code.validate(), read) {
            (Ok(()), Ok(read)) => assert_eq!(from_code, read, "{variable}={text}"),
            (Err(code), Err(read)) => {
                assert_eq!((code.variable, code.setting), (read.variable, read.setting));
                assert_eq!((code.variable, read.variable), (variable, variable));
                assert!(code.to_string().starts_with(&format!("Config::{}", code.setting)), "{code}");
                assert!(read.to_string().starts_with(variable), "{read}");
            }
            (code, read) => panic!("{variable}={text}: code has {code:?}, environment {read:?}"),
        }
    }
}

/// Each variable needs a case, because only the cases compare a variable with its setter.
#[test]
fn every_variable_has_a_case() {
    let asked = std::cell::RefCell::new(BTreeSet::new());
    let unset = |name: &str| {
        asked.borrow_mut().insert(name.to_owned());
        None
    };
    assert_eq!(Config::from_variables(unset), Ok(Config::default()));
    let compared: BTreeSet<String> = cases().iter().map(|case| case.variable.to_owned()).collect();
    let mut asked = asked.into_inner();
    // The software device reads these, and there are no setters.
    for variable in ["RDMA_SOFT_DIR", "RDMA_SOFT_PEERS"] {
        assert!(asked.remove(variable));
    }
    assert_eq!(compared, asked);
}

#[test]
fn durations_are_checked_below_their_unit() {
    let config = Config::default().handshake_timeout(Duration::from_micros(999));
    assert_eq!(config.validate().unwrap_err().setting, "handshake_timeout");
    let config = Config::default().spin_limit(Duration::from_secs(1) + Duration::from_nanos(1));
    assert_eq!(config.validate().unwrap_err().setting, "spin_limit");
}

/// These settings have no variable.
#[test]
fn times_have_limits() {
    let refused = |config: Config| config.validate().unwrap_err().setting;
    let (second, none) = (Duration::from_secs(1), Duration::ZERO);
    // A ping without a pause would keep the connection's task busy for ever, and a time beyond the clock's range would panic.
    for bad in [none, Duration::from_micros(999), Duration::from_secs(24 * 3600 + 1), Duration::MAX] {
        assert_eq!(refused(Config::default().ping(bad, second)), "ping (interval)");
        assert_eq!(refused(Config::default().ping(second, bad)), "ping (timeout)");
        assert_eq!(refused(Config::default().connect_timeout(bad)), "connect_timeout");
    }
    assert_eq!(refused(Config::default().linger(Duration::MAX)), "linger");
    for good in [Duration::from_millis(1), second, Duration::from_secs(24 * 3600)] {
        assert_eq!(Config::default().ping(good, good).connect_timeout(good).linger(good).validate(), Ok(()));
    }
    assert_eq!(Config::default().linger(none).validate(), Ok(()));
    let error = Config::default().linger(Duration::MAX).validate().unwrap_err().to_string();
    assert!(error.ends_with("takes a time from 0ns to 86400s"), "{error}");
}
