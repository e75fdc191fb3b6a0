//! Opening: `on` without a working NIC is an error that says what is missing, `auto` uses another engine and says why,
//! `off` looks for nothing.

use kvhoist::{Cache, Config, CopyPrefer, DeviceKind, EngineMode, Error, block_on};

use super::{
    caches::{config, copies, moved, open, round_trips},
    double::{get, set, until_forgotten, with_double, without_library},
};

/// The error of an open where it is `on`, and the reason of one where it is `auto`.
fn refused(config: Config) -> (String, String) {
    let error = match block_on(Cache::open(config.clone().gdr(EngineMode::On))) {
        Err(error @ Error::Unavailable { tier: "gdr", .. }) => error.to_string(),
        other => panic!("{:?}", other.map(|cache| cache.stats())),
    };
    until_forgotten();
    // What happens once only, or so many times, happens again.
    set(&std::env::var("IBV_DOUBLE").expect("the case says it"));
    let cache = open(config.gdr(EngineMode::Auto));
    let stats = cache.stats();
    assert!(!stats.gdr && stats.gdr_reason.starts_with("off: "), "{stats:?}");
    round_trips(&cache, 40);
    assert_eq!(copies(&cache, "gdr"), 0);
    assert!(copies(&cache, "cuda") > 0, "copied another way");
    block_on(cache.close()).expect("close");
    (error, stats.gdr_reason)
}

#[test]
fn what_is_missing_is_told() {
    let cases = [
        "none DOUBLE_ORDERING=0 TOLD=no+RDMA+device",
        "deny DOUBLE_ORDERING=0 TOLD=/dev/infiniband",
        "down DOUBLE_ORDERING=0 TOLD=not+active",
        "nogid DOUBLE_ORDERING=0 TOLD=no+GID",
        "nocq DOUBLE_ORDERING=0 TOLD=ibv_create_cq",
        "noqp DOUBLE_ORDERING=0 TOLD=ibv_create_qp",
        "modify=1 DOUBLE_ORDERING=0 TOLD=ibv_modify_qp",
        "modify=2 DOUBLE_ORDERING=0 TOLD=ibv_modify_qp",
        "modify=3 DOUBLE_ORDERING=0 TOLD=ibv_modify_qp",
        "nodmabuf DOUBLE_ORDERING=0 TOLD=nvidia-peermem",
        "late DOUBLE_FAULT=export DOUBLE_ORDERING=0 TOLD=nvidia-peermem",
        "late DOUBLE_FAULT=flush DOUBLE_ORDERING=0 TOLD=flushed",
        "lose=device DOUBLE_ORDERING=0 TOLD=a+write+to+the+device+lost+bytes",
        "lose=host DOUBLE_ORDERING=0 TOLD=a+write+from+the+device+lost+bytes",
        "lose DOUBLE_ORDERING=0 TOLD=lost+bytes",
        "wrong DOUBLE_ORDERING=0 TOLD=lost+bytes",
        "regions=0 DOUBLE_ORDERING=0 TOLD=ulimit",
        "regions=1 DOUBLE_ORDERING=0 TOLD=device+memory",
        "regions=2 DOUBLE_ORDERING=0 TOLD=host+memory",
        "regions=3 DOUBLE_ORDERING=0 TOLD=device+memory",
        "fail=1:12 DOUBLE_ORDERING=0 TOLD=failed+its+self-test",
        "fail=6:4 DOUBLE_ORDERING=0 TOLD=failed+its+self-test",
        "partial=1 DOUBLE_ORDERING=0 TOLD=failed+its+self-test",
        "fatal=1 DOUBLE_ORDERING=0 TOLD=failed+its+self-test",
    ];
    with_double("opening::what_is_missing_is_told", &cases, |_| {
        let told = std::env::var("TOLD").expect("the case tells").replace('+', " ");
        let (error, reason) = refused(config(true));
        assert!(error.contains(&told), "expected {told:?}: {error}");
        assert!(reason.contains(&told), "expected {told:?}: {reason}");
        until_forgotten();
    });
}

#[test]
fn without_the_library_it_is_told_where_to_get_it() {
    without_library("opening::without_the_library_it_is_told_where_to_get_it", |_| {
        let Err(error) = block_on(Cache::open(config(true))) else { panic!("there is no library") };
        let error = error.to_string();
        assert!(error.contains("libibverbs.so.1 was not found") && error.contains("libibverbs1"), "{error}");
        let cache = open(config(true).gdr(EngineMode::Auto));
        let stats = cache.stats();
        assert!(!stats.gdr && stats.gdr_reason.contains("libibverbs.so.1 was not found"), "{stats:?}");
        round_trips(&cache, 40);
        block_on(cache.close()).expect("close");
    });
}

#[test]
fn a_self_test_that_does_not_end_is_given_up() {
    with_double("opening::a_self_test_that_does_not_end_is_given_up", &["never=1 DOUBLE_ORDERING=0"], |_| {
        let (error, _) = refused(config(true).gdr_stuck_ms(1_500));
        assert!(error.contains("failed its self-test") && error.contains("1.5s"), "{error}");
    });
}

#[test]
fn what_works_is_used_and_told() {
    let cases = [
        "late DOUBLE_ORDERING=0",
        "late,nodmabuf,peermem DOUBLE_ORDERING=0",
        "late,ib DOUBLE_ORDERING=100",
        "late",
        "now,v1",
    ];
    with_double("opening::what_works_is_used_and_told", &cases, |case| {
        let cuda = case.contains("DOUBLE_ORDERING");
        let cache = open(config(cuda));
        round_trips(&cache, 40);
        let stats = cache.stats();
        let by = match (cuda, case.contains("peermem")) {
            (false, _) => "simulated",
            (true, false) => "dma-buf",
            (true, true) => "nvidia-peermem",
        };
        assert!(stats.gdr && stats.gdr_reason.contains(by) && stats.gdr_reason.contains("double0"), "{stats:?}");
        assert!(copies(&cache, "gdr") >= 40 && stats.gdr_failovers == 0, "{stats:?}");
        assert!(copies(&cache, "gdr") >= moved(&cache) && moved(&cache) >= 40, "no path is left out: {stats:?}");
        block_on(cache.close()).expect("close");
        drop(cache);
        until_forgotten();
    });
}

#[test]
fn the_device_that_is_named_is_taken() {
    with_double("opening::the_device_that_is_named_is_taken", &["late,devices=3"], |_| {
        let named = |name: &str| config(false).gdr_device(Some(name.into()));
        for name in ["double0", "double2"] {
            let cache = open(named(name));
            assert!(cache.stats().gdr_reason.contains(name), "{}", cache.stats().gdr_reason);
            block_on(cache.close()).expect("close");
        }
        let Err(error) = block_on(Cache::open(named("mlx5_7"))) else { panic!("there is none of this name") };
        let error = error.to_string();
        assert!(error.contains("no RDMA device mlx5_7; there is double0, double1, double2"), "{error}");
    });
}

#[test]
fn off_does_not_look_and_auto_does_not_with_a_simulated_device() {
    with_double("opening::off_does_not_look_and_auto_does_not_with_a_simulated_device", &["late"], |_| {
        for (cuda, gdr, told) in
            [(false, EngineMode::Off, "off"), (false, EngineMode::Auto, "is simulated"), (true, EngineMode::Off, "off")]
        {
            let cache = open(config(cuda).gdr(gdr));
            round_trips(&cache, 20);
            let stats = cache.stats();
            assert!(!stats.gdr && stats.gdr_reason.contains(told), "{stats:?}");
            assert_eq!((copies(&cache, "gdr"), get("registered"), get("objects")), (0, 0, 0));
            block_on(cache.close()).expect("close");
        }
        let Err(error) = block_on(Cache::open(config(false).device_blocks(0).device_layout(None))) else {
            panic!("there is no device tier")
        };
        assert!(matches!(error, Error::Config { field: "gdr", .. }), "{error}");
    });
}

#[test]
fn the_environment_goes_before_the_settings() {
    let cases = ["late KVHOIST_GDR=off", "late KVHOIST_GDR=on", "none KVHOIST_GDR=on", "late KVHOIST_GDR=maybe"];
    with_double("opening::the_environment_goes_before_the_settings", &cases, |case| {
        // The opposite of each.
        let gdr = if case.ends_with("=off") { EngineMode::On } else { EngineMode::Off };
        let opened = block_on(Cache::open(config(false).gdr(gdr)));
        match (case, opened) {
            ("late KVHOIST_GDR=off", Ok(cache)) => assert!(!cache.stats().gdr),
            ("late KVHOIST_GDR=on", Ok(cache)) => assert!(cache.stats().gdr),
            ("none KVHOIST_GDR=on", Err(Error::Unavailable { tier: "gdr", .. })) => {}
            ("late KVHOIST_GDR=maybe", Err(Error::Config { field: "KVHOIST_GDR", found, .. })) => {
                assert_eq!(found, "maybe");
            }
            (case, other) => panic!("{case}: {:?}", other.map(|cache| cache.stats())),
        }
    });
}

#[test]
fn auto_on_a_cuda_device_is_right_whatever_it_prefers() {
    with_double("opening::auto_on_a_cuda_device_is_right_whatever_it_prefers", &["now DOUBLE_ORDERING=0"], |_| {
        for copy_prefer in [CopyPrefer::Latency, CopyPrefer::Throughput, CopyPrefer::SpareGpu] {
            let cache = open(config(true).gdr(EngineMode::Auto).copy_prefer(copy_prefer).device(DeviceKind::Cuda));
            round_trips(&cache, 60);
            let stats = cache.stats();
            assert!(stats.gdr, "it is there, and takes part: {stats:?}");
            assert!(copies(&cache, "gdr") + copies(&cache, "cuda") >= 60, "{stats:?}");
            block_on(cache.close()).expect("close");
        }
    });
}
