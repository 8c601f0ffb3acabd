use std::time::Duration;

use super::calibration::tests::sample;
use super::*;

fn soft() -> Arc<dyn Context> {
    tonic_rdma_verbs::soft::open().unwrap()
}

fn chooser_of(config: &Config, context: &Arc<dyn Context>) -> Chooser {
    Chooser::new(config, context, |_, _| unreachable!("the software device is not measured"))
}

/// Returns the chooser of a connection over a device that is measured.
fn follower(measured: &Measured, config: &Config) -> Chooser {
    let first = Choice::unmeasured(Some(DEFAULT_THRESHOLD), "the calibration is under way");
    Chooser { first, measured: Some(Arc::clone(measured)), ..chooser_of(config, &soft()) }
}

/// Ends the measurement of a device.
fn settle(measured: &Measured, calibration: Result<Calibration, String>) {
    measured.set(Choice::measured("rxe0", calibration)).unwrap();
}

fn crossing() -> Calibration {
    let mut calibration = sample(&[(4096, 10, 30), (16_384, 40, 30), (1 << 20, 2000, 1000)]);
    calibration.chunks = [(DEFAULT_CHUNK, 1000), (1 << 20, 800)]
        .map(|(chunk, micros)| (chunk, Duration::from_micros(micros)))
        .into();
    calibration
}

#[test]
fn a_configured_threshold_is_fixed() {
    let config = Config::default().eager_threshold(EagerThreshold::Bytes(5000)).chunk_size(8192);
    let chooser = chooser_of(&config, &soft());
    assert!(!chooser.by_rendezvous(4999) && chooser.by_rendezvous(5000));
    assert_eq!((chooser.chunk(), chooser.sources()), (8192, 32));
    assert_eq!(chooser.why(100).to_string(), "100 B eagerly: threshold 5000 B, set by configuration");
    let never = chooser_of(&Config::default().eager_threshold(EagerThreshold::Bytes(u64::MAX)), &soft());
    assert_eq!(never.why(4 << 20).to_string(), "4 MiB eagerly: no threshold, set by configuration");
}

#[test]
fn writes_are_gathered_up_to_the_threshold_of_a_network_device() {
    let measured = Measured::default();
    let network = Chooser { is_software: false, ..follower(&measured, &Config::default()) };
    assert_eq!((network.gathered(), network.registered_threshold()), (DEFAULT_THRESHOLD - 1, None));
    settle(&measured, Ok(crossing()));
    assert_eq!((network.gathered(), network.registered_threshold()), ((16 << 10) - 1, Some(16 << 10)));
    let configured = |bytes| {
        let config = Config::default().eager_threshold(EagerThreshold::Bytes(bytes));
        Chooser { is_software: false, ..chooser_of(&config, &soft()) }
    };
    assert_eq!(configured(100).gathered(), Chooser::LEAST_GATHERED);
    assert_eq!(configured(u64::MAX).gathered(), usize::MAX);
    assert_eq!(configured(5000).registered_threshold(), Some(5000));
    let software = chooser_of(&Config::default(), &soft());
    assert_eq!((software.gathered(), software.registered_threshold()), (Chooser::LEAST_GATHERED, None));
}

#[test]
fn no_write_of_the_software_device_goes_by_rendezvous() {
    let chooser = chooser_of(&Config::default(), &soft());
    assert!([0, 1 << 16, usize::MAX].into_iter().all(|length| !chooser.by_rendezvous(length)));
    assert_eq!(
        chooser.why(1 << 20).to_string(),
        "1 MiB eagerly: no threshold, the default (rendezvous is never faster on the software device)"
    );
    let mut measured = crossing();
    measured.provider = SOFTWARE;
    assert_eq!(measured.threshold(), None);
}

#[test]
fn a_calibration_is_followed_once_it_is_there() {
    let measured = Measured::default();
    let chooser = follower(&measured, &Config::default());
    assert!(!chooser.by_rendezvous(32_768) && chooser.by_rendezvous(65_536));
    assert_eq!(
        chooser.why(32_768).to_string(),
        "32 KiB eagerly: threshold 64 KiB, the default (the calibration is under way)"
    );
    settle(&measured, Ok(crossing()));
    assert!(chooser.by_rendezvous(32_768) && !chooser.by_rendezvous(4096));
    assert_eq!(
        chooser.why(65_536).to_string(),
        "64 KiB by rendezvous: threshold 16 KiB, set by calibration of rxe0"
    );
    assert_eq!((chooser.chunk(), chooser.sources()), (1 << 20, 8), "the same memory in larger pieces");
    assert_eq!(follower(&measured, &Config::default().chunk_size(65_536)).chunk(), 65_536);
}

#[test]
fn a_device_without_calibration_has_the_default_threshold() {
    let measured = Measured::default();
    settle(&measured, Err("no loopback".into()));
    assert_eq!(
        follower(&measured, &Config::default()).why(1 << 16).to_string(),
        "64 KiB by rendezvous: threshold 64 KiB, the default (no loopback)"
    );
}
