use super::calibration::tests::sample;
use super::*;
use crate::endpoint::config::TuneCache;

/// Enough for every size, because a calibration without a size is not kept.
const ENOUGH: Duration = Duration::from_secs(600);

fn soft() -> Arc<dyn Context> {
    tonic_rdma_verbs::soft::open().unwrap()
}

/// Returns the chooser of a connection over a device that is measured.
fn follower(device: &Arc<Device>, config: &Config) -> Chooser {
    let first = Choice::unmeasured(Some(DEFAULT_THRESHOLD), "the calibration is under way");
    Chooser { first, device: Some(Arc::clone(device)), ..Chooser::new(config, &soft()) }
}

fn crossing() -> Calibration {
    let mut calibration = sample(&[(4096, 10, 30), (16_384, 40, 30), (1 << 20, 2000, 1000)]);
    let point =
        |chunk, micros| ChunkPoint { chunk, bytes: 1 << 22, rendezvous: Duration::from_micros(micros) };
    calibration.chunks = vec![point(DEFAULT_CHUNK, 1000), point(1 << 20, 800)];
    calibration
}

/// Waits for the result of the measurement.
fn result_of(device: &Device) -> &Choice {
    loop {
        match device.measured.get() {
            Some(choice) => return choice,
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

#[test]
fn a_configured_threshold_is_fixed() {
    let config = Config::default().eager_threshold(EagerThreshold::Bytes(5000)).chunk_size(8192);
    let chooser = Chooser::new(&config, &soft());
    assert!(!chooser.by_rendezvous(4999) && chooser.by_rendezvous(5000));
    assert_eq!((chooser.chunk(), chooser.sources()), (8192, 32));
    assert_eq!(chooser.why(100).to_string(), "100 B eagerly: threshold 5000 B, set by configuration");
    let never = Chooser::new(&Config::default().eager_threshold(EagerThreshold::Bytes(u64::MAX)), &soft());
    assert_eq!(never.why(4 << 20).to_string(), "4 MiB eagerly: no threshold, set by configuration");
}

#[test]
fn writes_are_gathered_up_to_the_threshold_of_a_network_device() {
    let device = Arc::new(Device::new("rxe0"));
    let network = Chooser { is_software: false, ..follower(&device, &Config::default()) };
    assert_eq!((network.gathered(), network.registered_threshold()), (DEFAULT_THRESHOLD - 1, None));
    device.settle(Ok(&crossing()));
    assert_eq!((network.gathered(), network.registered_threshold()), ((16 << 10) - 1, Some(16 << 10)));
    let configured = |bytes| {
        let config = Config::default().eager_threshold(EagerThreshold::Bytes(bytes));
        Chooser { is_software: false, ..Chooser::new(&config, &soft()) }
    };
    assert_eq!(configured(100).gathered(), Chooser::LEAST_GATHERED);
    assert_eq!(configured(u64::MAX).gathered(), usize::MAX);
    assert_eq!(configured(5000).registered_threshold(), Some(5000));
    let software = Chooser::new(&Config::default(), &soft());
    assert_eq!((software.gathered(), software.registered_threshold()), (Chooser::LEAST_GATHERED, None));
}

#[test]
fn no_write_of_the_software_device_goes_by_rendezvous() {
    let chooser = Chooser::new(&Config::default(), &soft());
    assert!([0, 1 << 16, usize::MAX].into_iter().all(|length| !chooser.by_rendezvous(length)));
    assert_eq!(
        chooser.why(1 << 20).to_string(),
        "1 MiB eagerly: no threshold, the default (rendezvous is never faster on the software device)"
    );
    let mut measured = crossing();
    measured.key.provider = SOFTWARE.into();
    assert_eq!(measured.threshold(), None);
    assert!(measured.reason().starts_with("no write of the software device does"), "{}", measured.reason());
}

#[test]
fn a_calibration_is_followed_once_it_is_there() {
    let device = Arc::new(Device::new("rxe0"));
    let chooser = follower(&device, &Config::default());
    assert!(!chooser.by_rendezvous(32_768) && chooser.by_rendezvous(65_536));
    assert_eq!(
        chooser.why(32_768).to_string(),
        "32 KiB eagerly: threshold 64 KiB, the default (the calibration is under way)"
    );
    device.settle(Ok(&crossing()));
    assert!(chooser.by_rendezvous(32_768) && !chooser.by_rendezvous(4096));
    assert_eq!(
        chooser.why(65_536).to_string(),
        "64 KiB by rendezvous: threshold 16 KiB, set by calibration of rxe0"
    );
    assert_eq!((chooser.chunk(), chooser.sources()), (1 << 20, 8), "the same memory in larger pieces");
    assert_eq!(follower(&device, &Config::default().chunk_size(65_536)).chunk(), 65_536);
}

#[test]
fn a_device_without_calibration_has_the_default_threshold() {
    let device = Arc::new(Device::new("rxe0"));
    device.settle(Err("no loopback".into()));
    assert_eq!(
        follower(&device, &Config::default()).why(1 << 16).to_string(),
        "64 KiB by rendezvous: threshold 64 KiB, the default (no loopback)"
    );
}

#[test]
fn a_process_measures_a_device_once() {
    // A length that no other test uses.
    let config = Config::default().receive_slots(16).slot_size(2000).tune_cache(TuneCache::Off);
    let device = Device::of(&soft(), &config);
    assert!(Arc::ptr_eq(&device, &Device::of(&soft(), &config)));
    assert!(matches!(result_of(&device).set_by, ThresholdSource::Calibration { .. }), "{device:?}");
}

#[test]
fn a_calibration_on_disk_is_followed_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let config = Config::default()
        .receive_slots(16)
        .slot_size(2100)
        .tune_cache(TuneCache::Directory(folder.path().into()));
    let mut calibration = crossing();
    calibration.key = Key::new(soft().attributes(), 2100);
    calibration::store(&config, &calibration).unwrap();
    let device = Device::of(&soft(), &config);
    // The threshold of the software device is none, but the chunks are those of the file.
    assert_eq!(device.measured.get().map(|choice| choice.chunk), Some(1 << 20));
}

#[test]
fn with_a_bad_file_or_directory_the_device_is_measured() {
    let folder = tempfile::tempdir().unwrap();
    let (bad, occupied) = (folder.path().join("bad"), folder.path().join("occupied"));
    std::fs::write(&occupied, "").unwrap();
    let configs = [(2200, bad), (2300, occupied)].map(|(length, path)| {
        Config::default().receive_slots(16).slot_size(length).tune_cache(TuneCache::Directory(path))
    });
    let mut calibration = crossing();
    calibration.key = Key::new(soft().attributes(), 2200);
    let path = calibration::store(&configs[0], &calibration).unwrap();
    std::fs::write(&path, "tonic-rdma calibration 3\nnonsense").unwrap();
    for config in configs {
        let device = Device::of(&soft(), &config);
        assert!(matches!(result_of(&device).set_by, ThresholdSource::Calibration { .. }), "{device:?}");
    }
}

#[test]
fn tune_measures_once_and_then_reads() {
    let folder = tempfile::tempdir().unwrap();
    let config = Config::default().tune_cache(TuneCache::Directory(folder.path().into()));
    let first = tune(&soft(), &config, false, ENOUGH).unwrap();
    assert!(!first.from_disk);
    // Stored by hand, because measurements on a busy machine may not agree.
    calibration::store(&config, &Calibration { steady: true, ..first.calibration.clone() }).unwrap();
    let second = tune(&soft(), &config, false, Duration::ZERO).unwrap();
    assert!(second.from_disk && second.kept.is_ok());
    assert_eq!(second.calibration.points, first.calibration.points);
    assert!(!tune(&soft(), &config, true, ENOUGH).unwrap().from_disk);
}
